"""Quality of a reply: does the JSON validate, does the code pass its tests, how likely is the prose.

The score is of the reply as a whole: one Markdown code fence is taken off, nothing else is forgiven.
"""

import json
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from specdec_lab.errors import DataError
from specdec_lab.tasks import sandbox
from specdec_lab.tasks.prompts import Prompt
from specdec_lab.tasks.registry import Score, get_task

ONE_FENCE = re.compile(r"\s*```[^\n`]*\n(.*)\n[ \t]*```\s*", re.DOTALL)
FENCES = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
DEFINITION = re.compile(r"^(?:def|class|async def) ", re.MULTILINE)


def score(prompt: Prompt, text: str, nll: float | None = None, tokens: Sequence[int] | None = None) -> Score:
    """The quality of the reply `text`, by the prompt's task type.

    nll: mean negative log-likelihood of the reply under the main model, nats per token (prose).
    tokens: the reply's token ids, for its repetition (prose).
    Raises UnknownNameError for a task without a score, DataError for a broken schema.
    """
    return get_task(prompt.task).scorer(prompt, text, nll, tokens)


def json_score(prompt: Prompt, text: str, nll: float | None, tokens: Sequence[int] | None) -> Score:
    """1.0 when the reply is JSON (RFC 8259, so no NaN) and validates against the prompt's schema, else 0.0.

    detail: parses, validates (None without a schema), fenced, error.
    """
    fence = ONE_FENCE.fullmatch(text)
    detail: dict[str, Any] = {"parses": False, "validates": None, "fenced": fence is not None, "error": ""}
    try:
        value = json.loads(fence[1] if fence else text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return Score(0.0, detail | {"error": str(error)})
    detail["parses"] = True
    if prompt.schema is not None:
        detail["error"] = _violation(prompt, value)
        detail["validates"] = detail["error"] == ""
    return Score(float(detail["validates"] is not False), detail)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _violation(prompt: Prompt, value: Any) -> str:
    """The first violation of the schema, or "". References resolve inside the schema, none is fetched."""
    import jsonschema
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    assert prompt.schema is not None
    kind = jsonschema.validators.validator_for(prompt.schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(prompt.schema)
        error = next(kind(prompt.schema, registry=Registry()).iter_errors(value), None)
    except (jsonschema.SchemaError, Unresolvable, re.error, RecursionError) as broken:
        reason = str(broken).splitlines()[0]
        raise DataError(f"prompt {prompt.id!r}: its schema cannot be used ({reason})") from broken
    return "" if error is None else f"{error.json_path}: {error.message}"[:300]


def code_score(prompt: Prompt, text: str, nll: float | None, tokens: Sequence[int] | None) -> Score:
    """1.0 when the code of the reply passes the prompt's tests in the sandbox, else 0.0; None without tests.

    detail: passed, error, timeout. Two forms: the whole function (MBPP, arXiv:2108.07732), or, with
    `raw_prompt`, either the whole function or its body (HumanEval, arXiv:2107.03374).
    """
    if prompt.tests is None:
        return Score(None, {"passed": None, "error": "the prompt has no tests", "timeout": False})
    for program in programs(prompt, text):
        result = sandbox.run_tests(program, prompt.tests)
        if not result.error.startswith(("SyntaxError", "IndentationError")):
            break
    detail = {"passed": result.passed, "error": result.error, "timeout": result.timed_out}
    return Score(float(result.passed), detail)


def extract_code(text: str) -> str:
    """The first fenced block that defines something, else the first fenced block, else the text itself.

    A fence that is still open at the end of the text (a reply cut by its length) counts as closed there.
    """
    blocks = FENCES.findall(text)
    return next((block for block in blocks if DEFINITION.search(block)), blocks[0] if blocks else text)


def programs(prompt: Prompt, text: str) -> list[str]:
    """The programs a reply may stand for, most literal first; a later one counts only if this is no syntax.

    Beyond one there are only bodies: as they are, without the first line's indentation, without any.
    """
    code = extract_code(text)
    if prompt.raw_prompt is None:
        return [code]
    name = re.escape(prompt.entry_point or "")
    if re.search(rf"^(?:async )?def {name}\b", code, re.MULTILINE):
        return [f"{prompt.raw_prompt}\n\n{code}"]
    body = code.strip("\r\n")
    bodies = (body, "    " + body.lstrip(), textwrap.indent(textwrap.dedent(body), "    "))
    return [f"{prompt.raw_prompt.rstrip()}\n{body}\n" for body in dict.fromkeys(bodies)]


def prose_score(prompt: Prompt, text: str, nll: float | None, tokens: Sequence[int] | None) -> Score:
    """The caller's `nll` as it is; detail: repetition (None without tokens), since loops are likely too."""
    from specdec_lab.metrics import repeated_ngrams

    return Score(nll, {"repetition": None if tokens is None else repeated_ngrams(tokens)})
