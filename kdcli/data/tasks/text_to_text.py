"""Generation tasks.

* Question generation for the answers of SQuAD 1.1: Du and Cardie 2018,
  https://arxiv.org/abs/1805.05942.
* XSum: Narayan et al. 2018, https://arxiv.org/abs/1808.08745.
* CNN/DailyMail: See et al. 2017, https://arxiv.org/abs/1704.04368.
"""

from kdcli.types import Task

_ROUGE = ("rougeL", "rouge1", "rouge2")

TASKS = (
    Task(
        "squad-qg",
        "text",
        ("context", "answers"),
        ("bleu", "rougeL"),
        label="question",
        hub=("rajpurkar/squad", None),
        max_length=512,
    ),
    Task(
        "xsum",
        "text",
        ("document",),
        _ROUGE,
        label="summary",
        hub=("EdinburghNLP/xsum", None),
        max_length=512,
    ),
    Task(
        "cnn_dailymail",
        "text",
        ("article",),
        # Published ROUGE-L values compare sentence by sentence.
        ("rougeLsum", "rouge1", "rouge2"),
        label="highlights",
        hub=("abisee/cnn_dailymail", "3.0.0"),
        max_length=768,
    ),
)
