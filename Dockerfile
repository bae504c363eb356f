# kdcli for the CPU, with ONNX Runtime and OpenVINO:
#   docker build -t kdcli .
#   docker run --rm -v "$PWD:/data" kdcli distill demo --to 2x64 -o /data/small
FROM python:3.12-slim
WORKDIR /src
# The build sees no git tag. Give the version: --build-arg SETUPTOOLS_SCM_PRETEND_VERSION=0.3.0
ARG SETUPTOOLS_SCM_PRETEND_VERSION
COPY pyproject.toml hatch_build.py constraints.txt README.md LICENSE CHANGELOG.md ./
COPY kdcli kdcli
COPY recipes recipes
# Builds of torch for the CPU: others bring gigabytes of CUDA libraries.
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 \
    && pip install --no-cache-dir -c constraints.txt '.[onnx,openvino,embed]' \
    && rm -rf /src \
    && useradd --create-home user
USER user
WORKDIR /data
ENTRYPOINT ["kdcli"]
CMD ["--help"]
