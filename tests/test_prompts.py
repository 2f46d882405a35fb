"""Prompts: the bundled sets are sound, files are read or refused line by line, and rendering follows the template."""

import hashlib
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specdoctor.errors import ExitCode, SpecdoctorError
from specdoctor.measure.prompt_file import RawPrompt, did_you_mean, parse_jsonl
from specdoctor.measure.prompts import (
    BUNDLED_CATEGORIES,
    Prompt,
    check_ids,
    interleave,
    load_bundled,
    load_jsonl,
    load_tokenizer,
    render,
    template_record,
)

GOLDEN_TARGET = Path(__file__).parents[1].parent / "shared" / "golden" / "target"

CHAT_TEMPLATE = (
    "<s>{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
THINKING_TEMPLATE = CHAT_TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}!{% endif %}"
NO_SYSTEM_TEMPLATE = "{{ raise_exception('no system role') if messages[0].role == 'system' }}" + CHAT_TEMPLATE


def byte_tokenizer(chat_template: str | dict[str, str] | None = None) -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges: 0 = <s>, 1 = </s>, then one id a byte. Adds <s> to plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1, **{symbol: i + 2 for i, symbol in enumerate(alphabet)}}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = chat_template
    return tokenizer


def user(text: str, prompt_id: str = "a", source: str = "p.jsonl:1") -> RawPrompt:
    return RawPrompt(prompt_id, "chat", source, messages=({"role": "user", "content": text},))


def write(path: Path, *rows: object) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def contents(prompt: RawPrompt) -> str:
    return "\n".join([*(message["content"] for message in prompt.messages), *prompt.later_turns])


# ---------------------------------------------------------------------------------------------------- bundled prompts


def test_bundled_prompts_are_many_unique_and_sorted_by_category() -> None:
    prompts = load_bundled()
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert len({contents(prompt) for prompt in prompts}) == len(prompts)
    counts = Counter(prompt.category for prompt in prompts)
    assert set(counts) == set(BUNDLED_CATEGORIES)
    assert all(count >= 12 for count in counts.values()), counts
    assert all(re.fullmatch(rf"{prompt.category}-\d{{3}}", prompt.id) for prompt in prompts)


def test_bundled_prompts_suit_every_chat_template() -> None:
    # Some templates refuse a system message, others anything but user and assistant in turn.
    for prompt in load_bundled():
        roles = [message["role"] for message in prompt.messages]
        assert roles == [("user", "assistant")[i % 2] for i in range(len(roles))]
        assert roles[-1] == "user"
    assert any(prompt.later_turns for prompt in load_bundled(["chat"]))


def test_bundled_summaries_have_a_source_text_of_the_promised_length() -> None:
    for prompt in load_bundled(["summarize"]):
        _instruction, source = contents(prompt).split("\n\n", 1)
        assert 120 <= len(source.split()) <= 350, prompt.id


@pytest.mark.parametrize("limit", [1, 4, 6, 10])
def test_a_limit_keeps_the_categories_balanced(limit: int) -> None:
    prompts = load_bundled(limit=limit)
    assert len(prompts) == limit
    counts = Counter(prompt.category for prompt in prompts)
    assert max(counts.values()) - min(counts[category] for category in BUNDLED_CATEGORIES) <= 1


def test_categories_are_taken_in_the_order_asked_for_and_once() -> None:
    prompts = load_bundled(["math", "code", "math"], limit=4)
    assert [prompt.id for prompt in prompts] == ["math-001", "code-001", "math-002", "code-002"]


def test_interleave_keeps_every_prompt_when_the_categories_differ_in_size() -> None:
    raw = [RawPrompt(str(i), category, "") for i, category in enumerate("aaab")]
    assert [prompt.id for prompt in interleave(raw)] == ["0", "3", "1", "2"]


def test_unknown_bundled_category_names_the_near_one() -> None:
    with pytest.raises(SpecdoctorError, match=r"'maths'.*code, chat, math, summarize.*did you mean 'math'"):
        load_bundled(["maths"])


def test_a_limit_below_one_and_no_category_are_refused() -> None:
    with pytest.raises(SpecdoctorError, match="limit is 0, expected at least 1"):
        load_bundled(limit=0)
    with pytest.raises(SpecdoctorError) as caught:
        load_bundled([])
    assert caught.value.exit_code is ExitCode.NOTHING


# ----------------------------------------------------------------------------------------------------------- reading


def test_each_field_is_read(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": "Hello"},
        "",
        {
            "id": "m",
            "category": "x",
            "messages": [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}],
        },
        {"id": 7, "turns": ["first", "second", "third"], "source": "elsewhere"},
        {"prompt_ids": [3, 1, 2], "prompt": None},
    )
    first, second, third, fourth = load_jsonl(path)
    assert (first.id, first.category, first.messages) == ("1", "", ({"role": "user", "content": "Hello"},))
    assert first.source == f"{path}:1"
    assert [message["role"] for message in second.messages] == ["system", "user"]
    assert (second.id, second.category) == ("m", "x")
    assert (third.id, third.messages[0]["content"], third.later_turns) == ("7", "first", ("second", "third"))
    assert (fourth.id, fourth.prompt_ids, fourth.messages) == ("5", (3, 1, 2), ())


def test_byte_order_mark_crlf_and_line_separators_inside_strings_are_fine() -> None:
    data = b'\xef\xbb\xbf{"prompt": "one"}\r\n\r\n{"prompt": "t\xe2\x80\xa8wo"}\r\n'
    prompts = parse_jsonl(data, "p.jsonl")
    assert [(prompt.id, prompt.messages[0]["content"]) for prompt in prompts] == [("1", "one"), ("3", "t\u2028wo")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x"', r"not JSON: .* at column 15; write one JSON object a line"),
        ('["prompt"]', r'found \["prompt"\], expected an object'),
        (
            '{"promt": "x"}',
            r"found \"promt\", expected one of prompt, messages, turns, prompt_ids \(did you mean 'prompt'",
        ),
        ("{}", r"found no fields, expected one of prompt"),
        ('{"prompt": null}', r"expected one of prompt"),
        ('{"prompt": "x", "prompt_ids": [1]}', r"found prompt and prompt_ids, expected only one of them"),
        ('{"prompt": ""}', r'prompt is "", expected text, not empty'),
        ('{"prompt": " \\n"}', r"prompt is .* expected text, not empty"),
        ('{"prompt": 3}', r"prompt is 3, expected text"),
        ('{"prompt": "\\ud83d"}', r"prompt has half a surrogate pair at character 0"),
        ('{"turns": []}', r"turns is \[\], expected a list with entries"),
        ('{"turns": "x"}', r'turns is "x", expected a list'),
        ('{"turns": ["x", 1]}', r"turns\[1\] is 1, expected text"),
        ('{"messages": []}', r"messages is \[\], expected a list with entries"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\] is .* expected role and content"),
        ('{"messages": [{"role": "user", "content": ["x"]}]}', r"messages\[0\]\.content is .* expected text"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', r"ends with role 'assistant', expected 'user'"),
        ('{"prompt_ids": []}', r"prompt_ids is \[\], expected a list with entries"),
        ('{"prompt_ids": [1, 2.0]}', r"prompt_ids\[1\] is 2\.0, expected a whole number"),
        ('{"prompt_ids": [true]}', r"prompt_ids\[0\] is true, expected a whole number"),
        ('{"prompt_ids": ["5"]}', r'prompt_ids\[0\] is "5", expected a whole number'),
        ('{"prompt_ids": [-1]}', r"prompt_ids\[0\] is -1, expected a whole number, 0 or more"),
        ('{"prompt": "x", "id": 1.5}', r"id is 1\.5, expected text"),
        ('{"prompt": "x", "category": 4}', r"category is 4, expected text"),
        ("[" * 100_000, r"unreadable JSON"),
    ],
)
def test_a_bad_line_is_refused_in_one_line_with_its_place(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "good"}, line)
    with pytest.raises(SpecdoctorError, match=message) as caught:
        load_jsonl(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code is ExitCode.USAGE


def test_duplicate_ids_name_both_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"id": "2", "prompt": "x"}, {"prompt": "y"})
    with pytest.raises(SpecdoctorError, match=r"p\.jsonl:2: id is '2', which .*p\.jsonl:1 has already"):
        load_jsonl(path)


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_nothing_to_do(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(SpecdoctorError, match="no prompts in the file") as caught:
        load_jsonl(path)
    assert caught.value.exit_code is ExitCode.NOTHING


def test_missing_files_and_other_encodings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecdoctorError, match=r"none\.jsonl: No such file"):
        load_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(SpecdoctorError, match="give a JSONL file"):
        load_jsonl(tmp_path)
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "x"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(SpecdoctorError, match=r"latin\.jsonl:2: not UTF-8"):
        load_jsonl(path)


def test_did_you_mean_ignores_case_and_keeps_quiet_about_far_words() -> None:
    assert did_you_mean("k", ["K", "temperature"]) == " (did you mean 'K'?)"
    assert did_you_mean("banana", ["K", "temperature"]) == ""


# --------------------------------------------------------------------------------------------------------- rendering


def test_chat_template_is_used_when_there_is_one_and_ends_where_the_answer_begins() -> None:
    tokenizer = byte_tokenizer(CHAT_TEMPLATE)
    (prompt,) = render([user("Grüße")], tokenizer)
    assert tokenizer.decode(prompt.ids) == "<s>[user]Grüße</s>[assistant]"
    assert prompt.ids[0] == 0 and prompt.ids.count(0) == 1  # the template wrote <s>; it must not come twice
    same = tokenizer.apply_chat_template([{"role": "user", "content": "Grüße"}], add_generation_prompt=True)
    assert prompt.ids == same["input_ids"]
    assert prompt.text_hash == hashlib.sha256("<s>[user]Grüße</s>[assistant]".encode()).hexdigest()[:16]


def test_plain_text_when_there_is_no_template_or_none_is_asked_for() -> None:
    for tokenizer, template in ((byte_tokenizer(), "auto"), (byte_tokenizer(CHAT_TEMPLATE), "none")):
        (prompt,) = render([user("Hi")], tokenizer, template)
        assert tokenizer.decode(prompt.ids) == "<s>Hi"
        assert template_record(tokenizer, template).kind == "plain"


def test_plain_text_joins_messages_by_blank_lines() -> None:
    empty, brief = {"role": "system", "content": ""}, {"role": "system", "content": "Be brief."}
    messages = (empty, brief, {"role": "user", "content": "Why?"})
    (prompt,) = render([RawPrompt("a", "", "p:1", messages=messages)], byte_tokenizer())
    assert byte_tokenizer().decode(prompt.ids) == "<s>Be brief.\n\nWhy?"


def test_thinking_is_switched_off_only_where_the_template_knows_it() -> None:
    tokenizer = byte_tokenizer(THINKING_TEMPLATE)
    (prompt,) = render([user("Hi")], tokenizer)
    assert tokenizer.decode(prompt.ids).endswith("[assistant]!")
    record = template_record(tokenizer)
    assert record.options == {"enable_thinking": False}
    assert record.sha256 == hashlib.sha256(THINKING_TEMPLATE.encode()).hexdigest()
    assert template_record(byte_tokenizer(CHAT_TEMPLATE)).options == {}


def test_a_template_with_a_date_gets_a_fixed_one() -> None:
    tokenizer = byte_tokenizer("{{ date_string if date_string is defined else 'today' }}" + CHAT_TEMPLATE)
    (prompt,) = render([user("Hi")], tokenizer)
    assert tokenizer.decode(prompt.ids).startswith("26 Jul 2024")


def test_named_templates_need_a_default() -> None:
    record = template_record(byte_tokenizer({"default": CHAT_TEMPLATE, "tool_use": "x"}))
    assert (record.kind, record.name) == ("chat", "default")
    assert record.sha256 == hashlib.sha256(CHAT_TEMPLATE.encode()).hexdigest()
    with pytest.raises(SpecdoctorError, match="chat templates rag, tool_use, expected one called 'default'"):
        template_record(byte_tokenizer({"tool_use": "x", "rag": "y"}))


def test_a_template_that_refuses_the_roles_is_named_with_the_prompt() -> None:
    raw = parse_jsonl(
        b'{"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}', "p.jsonl"
    )
    with pytest.raises(SpecdoctorError, match=r"p\.jsonl:1: .* refuses prompt '1' .* system, user: no system role"):
        render(raw, byte_tokenizer(NO_SYSTEM_TEMPLATE))


def test_raw_ids_bypass_tokenizer_and_template() -> None:
    raw = RawPrompt("r", "c", "p:1", prompt_ids=(9, 8, 7))
    with_template, without_tokenizer = (render([raw], t)[0] for t in (byte_tokenizer(CHAT_TEMPLATE), None))
    assert with_template.ids == [9, 8, 7] == without_tokenizer.ids
    assert with_template.text_hash == without_tokenizer.text_hash
    assert template_record(None).kind == "ids"


def test_text_without_a_tokenizer_is_refused_with_the_way_out() -> None:
    with pytest.raises(SpecdoctorError, match=r"p\.jsonl:1: .* no tokenizer files, expected prompt_ids.*'bytes'"):
        render([user("Hi")], None)


def test_bytes_are_ids_for_a_byte_level_target_only() -> None:
    (prompt,) = render([user("né")], None, "bytes")
    assert prompt.ids == [110, 195, 169]
    with pytest.raises(SpecdoctorError, match="'bytes', but the target has a tokenizer"):
        render([user("Hi")], byte_tokenizer(), "bytes")


def test_unknown_template_names_the_near_one() -> None:
    with pytest.raises(SpecdoctorError, match=r"template is 'byte', expected one of auto, none, bytes.*'bytes'"):
        render([user("Hi")], None, "byte")


def test_a_prompt_of_no_tokens_is_refused() -> None:
    backend = Tokenizer(models.BPE(vocab={"z": 0}, merges=[]))  # without unk_token: unknown symbols vanish
    with pytest.raises(SpecdoctorError, match=r"p\.jsonl:1: prompt 'a' gives no token"):
        render([user("mystery")], PreTrainedTokenizerFast(tokenizer_object=backend))


def test_ids_outside_the_vocabulary_are_refused() -> None:
    good, bad = Prompt("g", "", [0, 255], "", "p:1"), Prompt("b", "", [4, 256], "", "p:2")
    check_ids([good], 256)
    with pytest.raises(SpecdoctorError, match=r"p:2: token 1 of prompt 'b' has id 256, expected 0 to 255"):
        check_ids([good, bad], 256)
    with pytest.raises(SpecdoctorError, match="has id -1"):
        check_ids([Prompt("n", "", [-1], "")], 256)


def test_equal_text_gives_an_equal_hash_and_other_text_another() -> None:
    one, two, three = render([user("x"), user("x", "b"), user("y", "c")], byte_tokenizer(CHAT_TEMPLATE))
    assert one.text_hash == two.text_hash != three.text_hash


def test_every_bundled_prompt_renders() -> None:
    tokenizer = byte_tokenizer(NO_SYSTEM_TEMPLATE)
    prompts = render(load_bundled(), tokenizer)
    check_ids(prompts, len(tokenizer))
    assert len({prompt.text_hash for prompt in prompts}) == len(load_bundled())


# --------------------------------------------------------------------------------------------------- tokenizer loading


def test_a_saved_tokenizer_comes_back_with_its_template(tmp_path: Path) -> None:
    byte_tokenizer(CHAT_TEMPLATE).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert render([user("Hi")], tokenizer) == render([user("Hi")], byte_tokenizer(CHAT_TEMPLATE))
    assert template_record(tokenizer) == template_record(byte_tokenizer(CHAT_TEMPLATE))


def test_a_folder_without_tokenizer_files_has_no_tokenizer(tmp_path: Path) -> None:
    # transformers would make an empty tokenizer out of this configuration alone
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 256}')
    assert load_tokenizer(tmp_path) is None


def test_a_tokenizer_without_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(SpecdoctorError, match="no vocabulary beyond 1 special tokens; copy all tokenizer files"):
        load_tokenizer(tmp_path)


def test_broken_tokenizer_files_and_missing_folders_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(SpecdoctorError, match="cannot load the tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(SpecdoctorError, match="not a folder"):
        load_tokenizer(tmp_path / "none")  # never taken for the name of a repository


def test_golden_target_takes_bytes_and_raw_ids() -> None:
    if not GOLDEN_TARGET.exists():
        pytest.skip("no golden target beside the repository")
    tokenizer = load_tokenizer(GOLDEN_TARGET)
    assert tokenizer is None
    vocab_size = json.loads((GOLDEN_TARGET / "config.json").read_text())["vocab_size"]
    check_ids(render(load_bundled(), tokenizer, "bytes"), vocab_size)


def test_importing_the_modules_loads_no_model_library() -> None:
    code = (
        "import sys, specdoctor.measure.prompts, specdoctor.measure.scenarios\n"
        "print(*{'torch', 'transformers', 'tokenizers', 'jinja2'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
