"""The probabilities of the next token by transformers' own filters, in the order of the executors."""

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


def probabilities(
    logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> NDArray[np.float64]:
    scores = torch.tensor(logits, dtype=torch.float64)[None] / temperature
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    result: NDArray[np.float64] = torch.softmax(scores, -1)[0].numpy()
    return result
