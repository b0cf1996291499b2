"""Task types: prompts with a quality score each. Imports neither torch nor a model."""

from specdec_lab.tasks.prompts import Prompt, load_prompts, read_prompts
from specdec_lab.tasks.registry import Score, TaskSpec, get_task, register, tasks
from specdec_lab.tasks.scores import code_score, json_score, prose_score, score

__all__ = [
    "Prompt",
    "Score",
    "TaskSpec",
    "get_task",
    "load_prompts",
    "read_prompts",
    "register",
    "score",
    "tasks",
]

JSON = ("json_valid", "higher", json_score)
CODE = ("tests_passed", "higher", code_score)
PROSE = ("mean_nll", "lower", prose_score)
PARTS = {
    "multi_turn": ("task", "MT-bench questions, first turn"),
    "qa": ("task", "Natural Questions"),
    "math_reasoning": ("task", "GSM8K"),
    **{
        name: ("category", f"MT-bench questions: {name}")
        for name in ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
    },
}

register(TaskSpec("json", "a JSON object: function calls, extraction, schemas, SQL", *JSON, "json.jsonl"))
register(TaskSpec("code", "a Python function: HumanEval and MBPP", *CODE, "code.jsonl"))
register(TaskSpec("prose", "writing to an instruction", *PROSE, "prose.jsonl"))
register(TaskSpec("spec_bench", "Spec-Bench: all that may be shipped", *PROSE, "spec_bench.jsonl"))
for _name, (_field, _what) in PARTS.items():
    register(TaskSpec(_name, f"Spec-Bench: {_what}", *PROSE, "spec_bench.jsonl", (_field, _name)))
for _name, _quality in (("json", JSON), ("code", CODE), ("prose", PROSE), ("writing", PROSE)):
    register(TaskSpec(f"train_{_name}", f"{_name}, for distilling", *_quality, f"train_{_name}.jsonl"))
