"""`python -m specdec_lab.inference`: the command line of the articles, with their flag names, over `generate`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec_lab import cli
from specdec_lab.errors import DataError, SettingError, require

ABOUT = """Decode one prompt, with the flag names of the articles.

Without --enable_speculative_decoding (or "enable_speculative": true in --config) decoding is plain, and flags that
say how to draft are refused. A candidate is a chain of draft_length tokens. --acceptance_threshold, --max_retries or
--draft_temperature without --acceptance_rule mean the articles' rule `block`; without any of them decoding is lossless.
The way the flags are read is printed on standard error."""
DRAFTING = (
    "draft_model_path",
    "draft_length",
    "candidate_count",
    "initial_candidates",
    "branching",
    "acceptance_rule",
    "acceptance_threshold",
    "max_retries",
    "draft_temperature",
    "adaptive_threshold",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code, as cli.main does."""
    return cli.main(argv, _parser())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m specdec_lab.inference", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(run=_run, command="generate", profile=None, task=None)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--prompt", required=True, help="text, or - for standard input")
    parser.add_argument("--model_path", default="bundled", help="bundled, a folder, a GGUF file or a hub id")
    parser.add_argument("--config", type=Path, help="FILE.json, a dictionary decoding_params; flags win over it")
    draft = parser.add_argument_group("how to draft")
    draft.add_argument("--enable_speculative_decoding", action="store_true", help="draft and verify; else plain")
    draft.add_argument("--draft_model_path", help="a name that `specdec-lab models` lists, or as --model_path")
    draft.add_argument("--draft_length", type=int, help="tokens of each candidate; default 4")
    draft.add_argument("--candidate_count", type=int, help="candidates a step, 1 … 8; default 1")
    draft.add_argument("--initial_candidates", type=int, help="the same, by its name in the second article")
    draft.add_argument("--branching", help="how candidates part: chains (default), distinct, top_k or dynamic")
    draft.add_argument("--acceptance_threshold", type=float, help="0 … 1; a draft is kept if its score exceeds it")
    draft.add_argument(
        "--acceptance_rule", help="lossless, threshold, typical, lenience, block or sequence; default see above"
    )
    draft.add_argument("--max_retries", type=int, help="how often a refused draft is drawn anew; default 2")
    draft.add_argument("--draft_temperature", type=float, help="what drafts of block and sequence are drawn at")
    draft.add_argument("--adaptive_threshold", type=float, help="more candidates while verification succeeds so often")
    cli._running_options(parser)
    cli._constraint_options(parser, "FILE or any")
    parser.add_argument("--stop", action="append", default=[], help="text that ends the output; may be repeated")
    return parser


def _run(args: argparse.Namespace) -> Any:
    """`generate`, with the flags in its own words."""
    request = argparse.Namespace(**vars(args) | _read(args))
    print(f"specdec-lab: read as {_said(request)}", file=sys.stderr)
    return cli._generate(request)


def _read(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `generate` that the flags stand for; raises SettingError for flags that contradict each other."""
    from specdec_lab.articles import BRANCHING, rule_of

    given = {name: getattr(args, name) for name in DRAFTING if getattr(args, name) is not None}
    if {"candidate_count", "initial_candidates"} <= given.keys():
        allowed = "none beside --candidate_count, which is the same setting"
        raise SettingError("initial_candidates", given["initial_candidates"], allowed)
    enabled, settings = _config(args.config)
    if not (args.enable_speculative_decoding or enabled):
        for name, value in given.items():
            raise SettingError(name, value, "none without --enable_speculative_decoding, as decoding is then plain")
        settings = {"draft_model_path": "none", "draft_length": 0}
    settings |= given
    count = settings.get("candidate_count", settings.get("initial_candidates", 1))  # a file has the latter alone
    block = [settings.get(name) for name in ("acceptance_threshold", "max_retries", "draft_temperature")]
    adaptive = settings.get("adaptive_threshold")
    return {
        "main": args.model_path,
        "draft": settings.get("draft_model_path", "1:4"),
        "draft_length": settings.get("draft_length", 4),
        "candidate_count": count,
        "branching": settings.get("branching") or (None if count == 1 and adaptive is None else BRANCHING),
        "acceptance_rule": rule_of(settings.get("acceptance_rule"), *block),
        **dict(zip(("acceptance_threshold", "max_retries", "draft_temperature"), block, strict=True)),
        "adaptive_threshold": adaptive,
    }


def _config(file: Path | None) -> tuple[bool, dict[str, Any]]:
    """(Whether to draft, the other settings) of a decoding_params file; raises DataError for one that is broken."""
    from specdec_lab.articles import DecodingParams

    if file is None:
        return False, {}
    try:
        stored = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as JSON ({error})") from error
    require("config", str(file), isinstance(stored, dict), "a file that holds the dictionary decoding_params")
    params = DecodingParams.from_dict(stored)
    settings = {name: getattr(params, name) for name in stored if name != "enable_speculative"}
    return params.enable_speculative, settings


def _said(request: argparse.Namespace) -> str:
    """The setting in words, validated."""
    from specdec_lab.acceptance import RULES

    if request.draft_length == 0:
        return "plain decoding"
    arm = cli._arm(request, cli._drafting(request, None))
    words = [f"draft {request.draft}", f"draft_length {request.draft_length}", f"candidate_count {arm.candidate_count}"]
    if request.branching is not None:
        words.append(f"branching {arm.branching}")
    if arm.adaptive_threshold is not None:
        words.append(f"adaptive_threshold {arm.adaptive_threshold:g} (the last verifications set the candidates)")
    words.append(f"acceptance_rule {arm.acceptance_rule} ({RULES[arm.acceptance_rule].about})")
    for name in ("acceptance_threshold", "max_retries", "draft_temperature"):
        if getattr(arm, name) is not None:
            words.append(f"{name} {getattr(arm, name):g}")
    return ", ".join(words)


if __name__ == "__main__":
    raise SystemExit(main())
