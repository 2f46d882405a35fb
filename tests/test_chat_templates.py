"""Chat templates rendered as transformers does, without a way out to Python."""

from specdoctor.formats.chat_template import Refusal, render_all


def test_templates_render_as_transformers_does() -> None:
    template = (
        "{% generation %}{{ bos_token }}{% endgeneration %}\n"
        "{%- for m in messages %}\n    {% if loop.index > 2 %}{% break %}{% endif %}\n"
        "{{ m | tojson }} {{ strftime_now('%Y') }}\n{% endfor %}"
    )
    (text,) = render_all(
        template, [{"name": "x", "messages": [{"role": "user", "content": "é"}] * 3}], {"bos_token": "<s>"}
    )
    assert isinstance(text, str) and text.startswith("<s>") and text.count('"é"') == 2 and "2025" in text


def test_templates_cannot_reach_python() -> None:
    escapes = ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% for", "{{ raise_exception('no') }}"]
    for template in escapes:
        (result,) = render_all(template, [{"messages": []}], {})
        assert isinstance(result, Refusal), template
