"""Linear probes on the last hidden states of a frozen encoder."""

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kdcli.data.demo import TASKS, demo_task

BATCH = 64
FeatureArray = NDArray[np.float32]


def probe_demo(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, dict[str, float]]:
    """Fit a logistic regression for each demo task, and score it on the validation split.

    Returns task -> {"accuracy": share}.
    """
    # Import here, because scikit-learn takes a second that a run without probes need not wait for.
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    model.eval()
    scores = {}
    for task in TASKS:
        train, validation = (demo_task(task, split) for split in ("train", "validation"))
        scaler = StandardScaler()
        x_train = scaler.fit_transform(_means(model, tokenizer, [e.text for e in train]))
        classifier = LogisticRegression(max_iter=2000, C=0.1)
        classifier.fit(x_train, [e.label for e in train])
        x_validation = scaler.transform(_means(model, tokenizer, [e.text for e in validation]))
        accuracy = classifier.score(x_validation, [e.label for e in validation])
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
