import pytest
import tokenizers
from support.checkpoints import CHATML, glassllm_tokenizer, tiny_tokenizer, tiny_vocab, write_json
from tokenizers import processors

from models.errors import TokenizerError
from models.hf_tokenizer import hf_tokenizer
from models.tokenizer import Tokenizer

BOS, EOS = tiny_vocab().index("<s>"), tiny_vocab().index("</s>")
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER = [{"role": "user", "content": "hi"}]
WRITES_BOS = "{{ bos_token }}" + CHATML


def tiny(template=None, *, bos=True, add_bos=None, special=SPECIAL):
    return Tokenizer(tiny_tokenizer(bos=bos), special, add_bos, template)


class TestEncoding:
    def test_text_comes_back(self):
        tokenizer = tiny()
        for text in ("", " ", "the thin  heron\n\tat 10", "漢字 👩‍👩‍👧‍👦 é e\u0301 \x00", "\U0010ffff\ufffd"):
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.decode(ids) == text
            assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)

    def test_special_tokens_in_a_text_are_one_token_each(self):
        ids = tiny().encode("a<|im_end|>b", add_special_tokens=False)
        assert ids[1:-1] == [tiny_vocab().index("<|im_end|>")]

    def test_decoding_skips_special_tokens_unless_told_otherwise(self):
        tokenizer = tiny()
        ids = tokenizer.encode("a<|im_end|>")
        assert tokenizer.decode(ids) == "a"
        assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a<|im_end|>"

    def test_lookups(self):
        tokenizer = tiny()
        assert tokenizer.vocab_size == len(tiny_vocab()) == 268
        assert (tokenizer.bos_id, tokenizer.eos_ids) == (BOS, (EOS,))
        assert tokenizer.id_to_token(BOS) == "<s>"
        assert tokenizer.id_to_token(268) is None
        assert tokenizer.decode([268, 300]) == ""

    def test_a_lone_surrogate_is_told_with_its_place(self):
        with pytest.raises(TokenizerError, match=r"lone surrogate, '\\ud83d' at index 2"):
            tiny().encode("ab\ud83d")

    @pytest.mark.parametrize("text", [None, 3, b"bytes", ["a"]])
    def test_only_strings_are_encoded(self, text):
        with pytest.raises(TokenizerError, match="expected a string"):
            tiny().encode(text)

    def test_truncation_and_padding_of_the_file_are_off(self):
        raw = tiny_tokenizer()
        raw.enable_truncation(4)
        raw.enable_padding(length=64)
        assert len(Tokenizer(raw, SPECIAL).encode("abcdefgh")) == 9


class TestExactlyOneBos:
    def test_the_post_processor_decides_where_nothing_else_does(self):
        assert tiny().encode("ab")[0] == BOS
        assert tiny().adds_bos
        assert tiny(bos=False).encode("ab")[0] != BOS
        assert not tiny(bos=False).adds_bos

    def test_the_setting_overrules_the_post_processor(self):
        assert tiny(bos=False, add_bos=True).encode("ab")[0] == BOS
        assert tiny(bos=True, add_bos=False).encode("ab")[0] != BOS

    def test_an_empty_text_is_its_bos(self):
        assert tiny().encode("") == [BOS]
        assert tiny(bos=False).encode("") == []

    @pytest.mark.parametrize("add_bos", [None, True])
    def test_a_text_that_begins_with_it_has_it_once(self, add_bos):
        assert tiny(add_bos=add_bos).encode("<s>ab").count(BOS) == 1

    def test_it_is_left_out_on_demand(self):
        assert BOS not in tiny().encode("ab", add_special_tokens=False)

    @pytest.mark.parametrize("template", [CHATML, WRITES_BOS])
    def test_a_chat_has_one_whether_or_not_the_template_writes_it(self, template):
        ids = tiny(template).encode_chat(USER)
        assert ids[0] == BOS
        assert ids.count(BOS) == 1

    def test_a_rendered_chat_that_is_passed_as_a_text_has_one(self):
        tokenizer = tiny(WRITES_BOS)
        text = tokenizer.apply_chat_template(USER)
        assert text.startswith("<s>")
        assert tokenizer.encode(text) == tokenizer.encode_chat(USER)

    def test_a_model_without_bos_gets_none(self):
        tokenizer = tiny(WRITES_BOS, bos=False, special={"eos_token": "</s>"})
        assert tokenizer.bos_id is None
        assert BOS not in tokenizer.encode("ab") + tokenizer.encode_chat(USER)

    def test_a_template_may_write_it_where_the_model_adds_none(self):
        assert tiny(WRITES_BOS, bos=False).encode_chat(USER).count(BOS) == 1

    def test_a_post_processors_eos_is_not_added(self):
        raw = tiny_tokenizer()
        raw.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
        assert EOS not in Tokenizer(raw, SPECIAL).encode("ab")

    def test_asking_for_a_bos_that_has_no_name_adds_none(self):
        assert tiny(add_bos=True, special={}).encode("ab", add_special_tokens=True)[0] != BOS

    def test_a_special_token_outside_the_vocabulary(self):
        with pytest.raises(TokenizerError, match="'<x>' is not in the tokenizer's vocabulary"):
            tiny(special={"bos_token": "<x>"})


class TestChat:
    def test_rendering(self):
        chat = [{"role": "system", "content": "be <brief> & so"}, *USER]
        text = "<|im_start|>system\nbe <brief> & so<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        assert tiny(CHATML).apply_chat_template(chat, add_generation_prompt=False) == text
        assert tiny(CHATML).apply_chat_template(chat) == text + "<|im_start|>assistant\n"

    def test_no_template(self):
        with pytest.raises(TokenizerError, match=r"no chat template.*pass it to generate"):
            tiny().apply_chat_template(USER)

    @pytest.mark.parametrize(
        ("messages", "told"),
        [
            ([], "at least one"),
            ("hi", "messages='hi'"),
            (None, "messages=None"),
            (["hi"], r"messages\[0\]='hi'"),
            ([*USER, {"role": "user"}], r"messages\[1\]\['content'\]=None"),
            ([{"content": "x"}], r"messages\[0\]\['role'\]=None"),
            ([{"role": "user", "content": [{"type": "text"}]}], r"\['content'\]=\[\{"),
            ([{"role": 1, "content": "x"}], r"\['role'\]=1"),
        ],
    )
    def test_malformed_messages_are_named(self, messages, told):
        with pytest.raises(TokenizerError, match=told):
            tiny(CHATML).apply_chat_template(messages)

    def test_a_template_may_refuse(self):
        template = "{{ raise_exception('roles must alternate') }}"
        with pytest.raises(TokenizerError, match=r"TemplateError: roles must alternate.*Check their roles"):
            tiny(template).apply_chat_template(USER)

    @pytest.mark.parametrize(
        "template", ["{{ 1 / 0 }}", "{{ messages[5].role }}", "{{ nothing() }}", "{{ 'a' + 1 }}"]
    )
    def test_a_failing_template_is_told(self, template):
        with pytest.raises(TokenizerError, match="chat template failed"):
            tiny(template).apply_chat_template(USER)

    @pytest.mark.parametrize("template", ["{% for %}", "{{", "{% if x %}"])
    def test_a_template_that_does_not_compile_is_told_when_the_model_is_opened(self, template):
        with pytest.raises(TokenizerError, match="does not compile"):
            tiny(template)

    @pytest.mark.parametrize(
        "template",
        [
            "{{ messages.__class__.__mro__ }}",
            "{{ ''.__class__.__base__.__subclasses__() }}",
            "{{ messages.append(1) }}",
            "{{ cycler.__init__.__globals__ }}",
        ],
    )
    def test_a_template_runs_in_a_sandbox(self, template):
        with pytest.raises(TokenizerError, match="SecurityError"):
            tiny(template).apply_chat_template(USER)

    def test_what_templates_rely_on(self):
        def render(template):
            return tiny(template).apply_chat_template(USER)

        assert render("{{ eos_token }}{{ unk_token }}") == "</s>"
        assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
        assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
        assert render("{% for i in [1, 2] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
        assert render("{%- set x = namespace(a=1) -%}\n{% set x.a = 2 %}\n{{ x.a }}") == "2"
        assert render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"  # trim_blocks and lstrip_blocks
        assert render("{% if tools is none %}{{ messages[0]['content'] | trim }}{% endif %}") == "hi"
        assert len(render("{{ strftime_now('%Y') }}")) == 4
        assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hi!"


class TestHuggingFaceDirectory:
    @staticmethod
    def write(directory, raw=None, template=None, **files):
        (raw or tiny_tokenizer()).save(str(directory / "tokenizer.json"))
        for name, values in files.items():
            write_json(directory / f"{name}.json", values)
        if template is not None:
            (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
        return hf_tokenizer(directory)

    def test_special_tokens_as_strings_and_as_objects(self, tmp_path):
        bos = {"__type": "AddedToken", "content": "<s>", "lstrip": False}
        tokenizer = self.write(tmp_path, tokenizer_config={"bos_token": bos, "eos_token": "</s>"})
        assert (tokenizer.bos_id, tokenizer.eos_ids) == (BOS, (EOS,))

    def test_special_tokens_map_fills_what_the_config_leaves_out(self, tmp_path):
        tokenizer = self.write(
            tmp_path,
            tokenizer_config={"eos_token": "<|im_end|>", "bos_token": None},
            special_tokens_map={"bos_token": {"content": "<s>"}, "eos_token": "</s>"},
        )
        assert tokenizer.bos_id == BOS
        assert tokenizer.eos_ids == (tiny_vocab().index("<|im_end|>"),)

    def test_no_settings_at_all(self, tmp_path):
        tokenizer = self.write(tmp_path)
        assert (tokenizer.bos_id, tokenizer.eos_ids) == (None, ())
        assert tokenizer.encode("ab") == tokenizer.encode("<s>ab")  # the post-processor's prefix, once

    @pytest.mark.parametrize("add_bos", [True, False])
    def test_add_bos_token(self, tmp_path, add_bos):
        tokenizer = self.write(tmp_path, tokenizer_config=SPECIAL | {"add_bos_token": add_bos})
        assert (tokenizer.encode("ab")[0] == BOS) == add_bos

    def test_a_template_in_the_config(self, tmp_path):
        tokenizer = self.write(tmp_path, tokenizer_config={"chat_template": "A"})
        assert tokenizer.apply_chat_template(USER) == "A"

    def test_a_template_of_several_by_name(self, tmp_path):
        named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
        assert (
            self.write(tmp_path, tokenizer_config={"chat_template": named}).apply_chat_template(USER) == "D"
        )
        named = named[:1]
        assert self.write(tmp_path, tokenizer_config={"chat_template": named}).chat_template is None

    def test_a_template_in_its_own_file_wins(self, tmp_path):
        tokenizer = self.write(tmp_path, template="F é", tokenizer_config={"chat_template": "A"})
        assert tokenizer.apply_chat_template(USER) == "F é"

    @pytest.mark.parametrize("found", ["tokenizer.model", "vocab.json", "tekken.json"])
    def test_another_form_of_tokenizer_is_named(self, tmp_path, found):
        (tmp_path / found).write_text("x")
        with pytest.raises(TokenizerError, match=f"no tokenizer.json .found: {found}.*save_pretrained"):
            hf_tokenizer(tmp_path)

    def test_no_tokenizer(self, tmp_path):
        with pytest.raises(TokenizerError, match="no tokenizer file"):
            hf_tokenizer(tmp_path)

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"model": {"type": "Nonsense"}}'])
    def test_a_broken_tokenizer_is_named(self, tmp_path, text):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot be read"):
            hf_tokenizer(tmp_path)

    @pytest.mark.parametrize(
        ("settings", "told"),
        [
            ({"bos_token": 3}, "bos_token=3"),
            ({"bos_token": {"content": 3}}, "bos_token="),
            ({"add_bos_token": "yes"}, "add_bos_token='yes'"),
            ({"chat_template": 3}, "chat_template=3"),
            ([], "expected a JSON object"),
        ],
    )
    def test_broken_settings_are_named(self, tmp_path, settings, told):
        with pytest.raises(TokenizerError, match=told):
            self.write(tmp_path, tokenizer_config=settings)

    def test_a_template_that_is_no_text_is_named(self, tmp_path):
        (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
        with pytest.raises(TokenizerError, match=r"chat_template\.jinja"):
            self.write(tmp_path)


def test_a_character_bpe_with_its_own_decoder(tmp_path):
    """glassllm's tokenizer: no byte fallback, unknown characters become <unk>."""
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = Tokenizer(glassllm_tokenizer(), special)
    text = "“Who are you?” said the Caterpillar.\n\nThis was not  an encouraging opening"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("né") == tokenizer.encode("ne\u0301")
    assert tokenizer.raw.token_to_id("<unk>") in tokenizer.encode("漢")
    assert isinstance(tokenizer.raw, tokenizers.Tokenizer)
