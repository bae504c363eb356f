"""Linear probes on the last hidden states of a frozen encoder."""

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kdcli.data.demo import TASKS, demo_task

BATCH = 64
ITERATIONS = 2000
INVERSE_PENALTY = 0.1
FeatureArray = NDArray[np.float32]


def probe_demo(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, dict[str, float]]:
    """Fit a logistic regression for each demo task, and score it on the validation split.

    The features are standardised. Returns task -> {"accuracy": share}.
    """
    # scikit-learn takes seconds to import.
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model.eval()
    scores = {}
    for task in TASKS:
        train, validation = (demo_task(task, split) for split in ("train", "validation"))
        regression = make_pipeline(
            StandardScaler(), LogisticRegression(C=INVERSE_PENALTY, tol=1e-5, max_iter=ITERATIONS)
        )
        train_ND, other_MD = (
            _means(model, tokenizer, [e.text for e in examples]).astype(np.float64)
            for examples in (train, validation)
        )
        regression.fit(train_ND, [e.label for e in train])
        accuracy = regression.score(other_MD, [e.label for e in validation])
        scores[task] = {"accuracy": float(accuracy)}
    return scores


@torch.no_grad()
def _means(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]
) -> FeatureArray:
    """Return the mean of the last hidden states over real tokens, [texts, D].

    Texts of similar length share a batch.
    """
    device = next(model.parameters()).device
    order = np.argsort([len(text) for text in texts], kind="stable")
    rows = []
    for start in range(0, len(texts), BATCH):
        chosen = [texts[i] for i in order[start : start + BATCH]]
        batch = tokenizer(chosen, padding=True, truncation=True, return_tensors="pt").to(device)
        hidden_BLD = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).last_hidden_state
        real_BL1 = batch["attention_mask"][:, :, None].to(hidden_BLD.dtype)
        rows.append(((hidden_BLD * real_BL1).sum(1) / real_BL1.sum(1)).float().cpu().numpy())
    return np.concatenate(rows)[np.argsort(order)]
