"""The HTML report: what it says, that it says no more, and that it stands alone."""

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from html_outline import Outline
from report_documents import (
    accept_document,
    bench_document,
    category_row,
    check_document,
    drafting_arm,
    estimate,
    plain_arm,
    profile_document,
)
from typer.testing import CliRunner

from specdoctor.cli.app import app
from specdoctor.errors import SpecdoctorError
from specdoctor.reports.html import render_report, verdicts, write_report

GOLDEN = Path(__file__).parent / "data" / "golden"


def headline(document: dict[str, Any]) -> str:
    (found,) = verdicts([document])
    return found.headline


def test_page_stands_alone_and_is_well_formed() -> None:
    page = render_report([bench_document(), accept_document(), profile_document(), check_document()])
    outline = Outline(page)
    assert outline.trouble == []
    assert not outline.all("script") and not outline.all("img") and not outline.all("iframe")
    addresses = [value for e in outline.elements for key, value in e.attributes.items() if key in ("src", "href")]
    assert addresses and all(address.startswith("#") or address == "data:," for address in addresses)
    assert not re.search(r"url\((?!#)|@import|https?:", page)
    (policy,) = [a["content"] for a in outline.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")


def test_ids_are_unique_and_every_reference_resolves() -> None:
    page = render_report([bench_document(), accept_document(), accept_document(), profile_document()])
    ids = [e.attributes["id"] for e in Outline(page).elements if "id" in e.attributes]
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page))
    assert wanted and wanted <= set(ids)


def test_page_is_accessible() -> None:
    outline = Outline(render_report([bench_document(), accept_document(), profile_document()]))
    levels = [level for level, _ in outline.headings]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    figures = [a for a in outline.all("svg") if "aria-hidden" not in a]
    assert len(figures) == len(outline.all("figure")) >= 7
    assert all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in figures)
    assert all(a.get("scope") in ("row", "col", "rowgroup") for a in outline.all("th"))
    assert outline.all("html")[0]["lang"] == "en"
    assert any(a.get("name") == "viewport" for a in outline.all("meta"))


def test_same_documents_give_same_bytes_whatever_the_settings(tmp_path: Path) -> None:
    source, other = tmp_path / "x.json", tmp_path / "other.html"
    source.write_text(json.dumps(bench_document()))
    here = render_report([bench_document()], command="specdoctor report")
    (tmp_path / "matplotlibrc").write_text("axes.facecolor: red\nfont.size: 20\nsvg.fonttype: path\n")
    code = (
        "import sys, json, pathlib; from specdoctor.reports.html import render_report\n"
        "document = json.loads(pathlib.Path(sys.argv[1]).read_text())\n"
        "pathlib.Path(sys.argv[2]).write_text(render_report([document], command='specdoctor report'), 'utf-8')"
    )
    settings = {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "MPLCONFIGDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", code, str(source), str(other)], check=True, cwd=tmp_path, env=settings)
    assert other.read_text("utf-8") == here
    changed = bench_document()
    changed["arms"][1]["tau_step"]["value"] += 0.01
    assert render_report([changed], command="specdoctor report") != here


def test_numbers_of_the_file_stand_in_the_tables() -> None:
    document = bench_document()
    document["arms"][1]["by_category"] = {"code": category_row(2.72)}
    document["divergences"] = [
        {
            "arm": "small", "prompt_id": "code-001", "position": 17, "expected": 311, "found": 412,
            "gap": 0.0123, "noise": 0.5, "near_tie": True,
        }
    ]  # fmt: skip
    outline = Outline(render_report([document]))
    arms, time, phases, first, lengths, texts, divergence = outline.cells("small")
    assert arms[1:5] == ["dspark", "2", "2.50 [2.25, 3.00]", "1.50 [1.20, 1.90]"]
    assert time[1:4] == ["25.0 % [20.0, 30.0]", "65.0 % [60.0, 70.0]", "10.0 % [8.0, 12.0]"]
    assert time[5:7] == ["1.60 [1.50, 1.70]", "1.50 [1.20, 1.90]"]
    assert phases[1:] == ["2.000", "5.200", "0.800", "8.000"]  # shares of 2 x 0.08 s over 2 x 10 rounds
    assert first[1:] == ["1", "0.90 [0.80, 0.95]", "161", "0.90 [0.80, 0.95]", "163"]
    assert ["2", "0.60 [0.50, 0.70]", "162", "0.67 [0.60, 0.71]", "147"] in outline.cells("2")
    assert lengths[1:] == ["2", "4", "10"]
    assert texts[1:] == ["2", "2", "0", "0"]
    assert divergence[1:] == ["code-001", "17", "311", "412", "0.0123", "0.5", "near tie"]
    (category,) = outline.cells("code")
    assert category[1:4] == ["small", "1", "2.72 [2.62, 2.82]"]
    assert "all prompts equal: percentile interval, no spread seen" in outline.text
    assert "specdoctor bench --target 'models/big one' --json x.json" in outline.text
    assert "in this file's own words" in outline.text


def test_phases_of_the_file_are_preferred_to_shares() -> None:
    document = bench_document()
    document["arms"][1]["phases"] = {
        "draft": 0.001, "verify": 0.004, "accept": 0.0005, "commit": 0.0002, "schedule": 0.0, "round": 0.006,
    }  # fmt: skip
    outline = Outline(render_report([document]))
    head = next(row for row in outline.rows if row[0] == "arm" and row[-1] == "round")
    assert head == ["arm", "draft", "verify", "accept", "commit", "overhead", "round"]
    row = next(row for row in outline.cells("small") if len(row) == len(head) and row[1] == "1.000")
    assert row[1:] == ["1.000", "4.000", "0.500", "0.200", "0.300", "6.000"]


def test_absent_data_leave_no_section_behind() -> None:
    outline = Outline(render_report([bench_document()]))
    titles = [title for level, title in outline.headings if level == 3]
    assert titles == [
        "Tokens a round and speed", "Where the time goes", "Acceptance by position", "Is the text the same?",
        "How it was run",
    ]  # fmt: skip
    bare = {"schema_version": 1, "kind": "bench", "arms": [plain_arm()]}
    outline = Outline(render_report([bare]))
    assert "there is no drafter to judge" in outline.text
    assert "Acceptance by position" not in outline.text


def test_interrupted_run_and_arm_of_transformers() -> None:
    document = bench_document()
    hf = {key: plain_arm()[key] for key in ("requests", "draft", "tokens_per_s", "greedy_mismatches", "near_ties")}
    document["arms"].insert(1, {**hf, "name": "hf", "speedup": estimate(0.9, 0.8, 1.0), "attention": "sdpa"})
    document["interrupted"] = True
    outline = Outline(render_report([document]))
    assert "The run was interrupted" in outline.text
    assert outline.cells("hf")[0][:6] == ["hf", "none", "–", "–", "0.90 [0.80, 1.00]", "100.0 [90.0, 110.0]"]


def test_texts_are_escaped_wherever_they_come_from() -> None:
    name = "<script>alert(1)</script>&\"'$x_1$\x07\u2028" + "long" * 40
    document = bench_document(drafting_arm(name))
    document["settings"]["target"] = "<b>bold</b>"
    document["prompts"][0]["id"] = "<i>id</i>"
    page = render_report([document, check_document()])
    outline = Outline(page)
    assert outline.trouble == []
    assert not outline.all("script") and not outline.all("b") and not outline.all("i")
    assert "<script>alert(1)</script>" in outline.text  # as text, whole


def test_prompts_and_answers_stay_out() -> None:
    document = bench_document()
    for row in document["prompts"]:
        row |= {"text": "SECRET prompt", "completion": "SECRET answer", "completion_ids": [1, 2]}
    document |= {"texts": ["SECRET"], "records": "records.jsonl"}
    page = render_report([document])
    assert "code-001" in page and "d939f97506f452c9" in page
    assert "SECRET" not in page


def test_profile_shows_the_curve_and_every_step() -> None:
    outline = Outline(render_report([profile_document()]))
    assert outline.cells("draft backbone")[0][1:] == ["2.000", "20.0 %"]
    assert outline.cells("256")[0][1:] == ["29.600", "29.600"]
    label = next(a["aria-label"] for a in outline.all("svg") if a.get("aria-label", "").startswith("Target steps"))
    assert "64 tokens of context 244 at 1" in label  # 1 / 0.0041
    assert "A target forward of 1 row takes 4.00 ms." in outline.text
    table = {"schema_version": 1, "sps": profile_document()["sps"]}
    assert "Target steps per second" in render_report([table])
    assert headline(table).startswith("A target forward of 1 row takes 4.1 ms at 64 tokens of context; up to 16 rows")


def test_accept_shows_both_averages_curves_and_splits() -> None:
    outline = Outline(render_report([accept_document()]))
    assert outline.trouble == []
    rows = outline.cells("head")
    assert rows[0][1:6] == ["dspark", "2", "1.78 [1.58, 2.22]", "2.41 [1.84, 3.35]", "0.39 [0.30, 0.50]"]
    assert ["head", "bare", "+0.25 [+0.20, +0.37]", "10"] in rows
    assert ["head", "132.2", "57.8", "74.0"] in rows
    assert [
        "0.3",
        "head",
        "1.70 [1.60, 1.80]",
        "0.40",
        "2.00",
        "51.0 [49.3, 52.7]",
        "1.13 [1.06, 1.21]",
    ] in outline.rows
    assert outline.cells("last+1")[0][2] == "1.55 [1.45, 1.65]" and "one more than were accepted last" in outline.text
    assert outline.cells("256")[0][1:] == ["97.9 %", "1.77", "2.90"]
    assert outline.cells("4")[0][1:] == ["0.80", "0.60", "2.40"]
    assert outline.cells("word-start")[0][1:3] == ["head", "0.60 [0.50, 0.70]"]
    assert outline.cells("512-1023")[0][2] == "1.60 [1.50, 1.70]" and not outline.cells("0-15")  # one bin is no split
    labels = [a.get("aria-label", "") for a in outline.all("svg")]
    assert any(
        label.startswith("Tokens a round by draft length: head 1.50 [1.40, 1.60] at 1, 1.78") for label in labels
    )
    (by_threshold,) = [label for label in labels if label.startswith("Tokens a round by threshold on each")]
    assert "bare" not in by_threshold  # it has no head
    assert "SECRET" not in outline.text and "in this file's own words" in outline.text


def test_every_star_is_explained_in_its_section() -> None:
    page = render_report([bench_document(), accept_document(), profile_document()])
    starred = [part for part in re.findall(r"<section.*?</section>", page, re.S) if "<abbr" in part]
    assert len(starred) == 2
    for part in starred:
        reasons = set(re.findall(r'<abbr title="([^"]+)"', part))
        assert all(f"* {reason}." in part for reason in reasons), reasons


def test_documents_that_word_a_number_differently_are_both_heard() -> None:
    accept: Any = accept_document()
    accept["definitions"]["tau_step"] = "expected tokens / expected rounds"
    text = Outline(render_report([bench_document(), accept])).text
    assert "tau_step (bench) committed tokens per verify round, in this file's own words" in text
    assert "tau_step (accept) expected tokens / expected rounds" in text


def test_reliability_is_drawn_before_and_after_calibration() -> None:
    outline = Outline(render_report([accept_document()]))
    drawn = [a["aria-label"] for a in outline.all("svg") if a.get("aria-label", "").startswith("Reliability")]
    assert len(drawn) == 2
    assert all(
        "draft 1 0.50 at 0.80 (n 264); after calibration 0.50 at 0.50 (n 264); draft 2" in text for text in drawn
    )
    assert "bare: the drafter has no confidence head." in outline.text
    head = next(row for row in outline.rows if row[0] == "draft")
    assert head[-2:] == ["ECE after", "debiased RMS after"]


def test_findings_carry_code_severity_evidence_and_fix() -> None:
    text = Outline(render_report([check_document()])).text
    assert "error SD101: 2 ids mean other tokens <here>" in text
    for words in (
        "side drafter",
        "file tokenizer.json",
        "ids 2",
        "examples.0.id 7",
        "Use the target's tokenizer files.",
    ):
        assert words in text
    assert "target models/big one · drafter drafts/small" in text and "The exact command" not in text
    clean = check_document() | {"findings": [], "summary": "identical: all ids mean the same"}
    assert "Nothing was found." in Outline(render_report([clean])).text


def _changed(path: str, value: Any) -> dict[str, Any]:
    document: Any = bench_document()
    *way, last = path.split(".")
    inner = document
    for key in way:
        inner = inner[int(key)] if isinstance(inner, list) else inner[key]
    if value is KeyError:
        del inner[last]
    else:
        inner[last] = value
    return document


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([1, 2], "x.json: found a list, expected a JSON object"),
        ({"a": 1}, "x.json: kind: found nothing (keys: a), expected one of bench"),
        (_changed("kind", "quench"), "x.json: kind: found 'quench', expected one of bench"),
        (_changed("schema_version", 2), "x.json: schema_version: found 2, expected 1"),
        (_changed("arms", KeyError), "x.json: arms: found no such key, expected one"),
        (
            _changed("arms.1.speedup.value", "fast"),
            "x.json: arms.1.speedup.value: found 'fast', expected a valid number",
        ),
        (_changed("arms.1.tau_step.low", float("nan")), "x.json: arms.1.tau_step.low: found nan, expected a finite"),
        (_changed("arms.1.marginal", []), "x.json: arms.1: found 0 marginal and 2 conditional rates"),
        ({"kind": "cost-table", "sps": []}, "x.json: sps: found 0 entries, expected at least 1"),
        ({"sps": [{"rows": 1, "context": 0, "seconds": 0}]}, "x.json: sps.0.seconds: found 0, expected greater than 0"),
        (_changed("prompts.0.rounds", None), "x.json: prompts.0.rounds: found None, expected a valid integer"),
    ],
)
def test_wrong_documents_are_one_clear_line(document: Any, words: str) -> None:
    with pytest.raises(SpecdoctorError) as caught:
        render_report([document], names=["x.json"])
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_command_draws_several_files_and_keeps_the_old_page_on_trouble(
    tmp_path: Path,
) -> None:
    bench, profile, page = tmp_path / "bench.json", tmp_path / "profile.json", tmp_path / "out.html"
    bench.write_text(json.dumps(bench_document()))
    profile.write_text(json.dumps(profile_document()))
    runner = CliRunner()
    done = runner.invoke(app, ["report", str(bench), str(profile), "-o", str(page), "--json", "-"])
    assert done.exit_code == 0, done.output
    assert [row["tone"] for row in json.loads(done.stdout)["verdicts"]] == ["good", "good"]
    before = page.read_text()
    assert Outline(before).headings[1:2] == [(2, "Bench: big one")]
    bench.write_text("{")
    failed = runner.invoke(app, ["report", str(bench), "-o", str(page)])
    assert failed.exit_code == 2 and failed.stderr.count("\n") == 1
    assert "not one JSON document" in failed.stderr
    assert page.read_text() == before
    assert {path.name for path in tmp_path.iterdir()} == {"bench.json", "profile.json", "out.html"}


def test_write_report_is_whole_or_not_at_all(tmp_path: Path) -> None:
    write_report(tmp_path / "a.html", [bench_document()])
    assert (tmp_path / "a.html").read_text("utf-8") == render_report([bench_document()])
    with pytest.raises(SpecdoctorError):
        write_report(tmp_path / "b.html", [{}])
    assert not (tmp_path / "b.html").exists()


def _really(kind: str, folder: Path) -> dict[str, Any]:
    """What the commands write for a tiny trained pair."""
    from specdoctor.measure.accept_command import AcceptRequest, run_accept_request
    from specdoctor.measure.bench_command import run_bench_request
    from specdoctor.measure.profile import run_profile
    from specdoctor.measure.workload import BenchRequest

    drafts = [str(GOLDEN / "deepspec-dspark-vanilla"), str(GOLDEN / "deepspec-dflash")]
    request = BenchRequest(str(GOLDEN / "target"), drafts, template="bytes", max_prompts=2, max_new_tokens=8)
    if kind == "bench":
        return run_bench_request(request)
    if kind == "accept":
        request.temperature = 0.8
        return run_accept_request(AcceptRequest(workload=request, corpus=folder / "corpus"))
    request.drafts = drafts[:1]
    return run_profile(request, None, lambda step: None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bench", "accept", "profile"])
def test_what_the_commands_write_is_drawn(kind: str, tmp_path: Path) -> None:
    """A key that drifts apart from the report shows here, not at a user's."""
    result = _really(kind, tmp_path)
    assert result["kind"] == kind
    outline = Outline(render_report([json.loads(json.dumps(result, allow_nan=False))]))
    assert outline.trouble == []
    for arm in result.get("arms", []):
        if arm["draft"] is not None:
            row = outline.cells(arm["name"])[0]
            assert row[3].split()[0] == f"{arm['tau_step']['value']:.2f}"
    titles = [title for level, title in outline.headings if level == 3]
    last = {"bench": "Is the text the same?", "accept": "What acceptance depends on"}
    assert titles[-2:] == [last.get(kind, "What a target forward costs"), "How it was run"]
