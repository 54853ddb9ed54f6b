"""Short texts that tokenizers disagree on: spaces of all kinds, marks, scripts, numbers, and the texts of tokens."""

from __future__ import annotations

import random

SPACES = (
    "", " ", "  ", "\n", "\r\n", "\r", "\t\t \t", " \n \n\n  \n", "a\u00a0b\u202f c\u3000d", "x\u00a0\u00a0y \u00a0z",
    "line\u2028sep\u2029par\x85nel\x0bvt\x0cff", " " * 70 + "x", "\n" * 40 + "y", "trailing  ", " leading",
    "word  word   word    word\n\n  word\n \n\tword ", "a\u200bb\u200cc\u200dd\u2060e\u00adf", "\ufeffBOM first",
)  # fmt: skip
MARKS = (
    "caf\u00e9 cafe\u0301 \u1e69 s\u0323\u0307 \ud55c\uae00 \u1112\u1161\u11ab", "\u0301begins with a mark",
    "\u212bngstr\u00f6m \u2126 \u00bd \ufb01 \uff21\uff22\uff23 \u2460", "a \u0301b", "1\u0301 2\u20e3 #\ufe0f\u20e3",
    "e\u0301" * 40, "\u202eabc\u202c \u2066x\u2069", "👩‍👩‍👧‍👦🏳️‍🌈👍🏽🇮🇹🇩🇪", "🙂" * 50,
)  # fmt: skip
SCRIPTS = (
    "العَرَبِيَّةُ ١٢٣٤٥", "हिन्दी में क्षत्रिय १२३", "ภาษาไทยไม่มีช่องว่าง", "日本語とカタカナ、漢字。「引用」ｱｲｳ",
    "中文,没有空格。123年", "한국어 띄어쓰기", "Ελληνικά ΣΊΣΥΦΟΣ ὈΔΎΣΣΕΙΑ", "Привет ёЁ", "עִבְרִית",
    "İstanbul ıI straße STRASSE", "aB Ab ABc aBC AÁ áÁ ÀÉîõü", "ǅ ǈ ʰ ª º", "𝒜𝓑 𝟘𝟙 𐍈 𒀀 🀄",
    "\ue000\uf8ff\U000f0000\U0010ffff\ufffd\ufffe\u0378\ud7ff",
)  # fmt: skip
NUMBERS = (
    "1234567890123456789 3.14159e-10 0x1F 1,000,000 12:34:56", "x²+y³=Ⅷ ⅷ ٣٤ 1½ ¼", "٠١٢a1२b", "١" * 30,
)  # fmt: skip
WORDS = (
    "DON'T I'LL we'Ve 'S's 'ſ 'Kx they’re o'clock ''tis rock'n'roll", "__init__ snake_case CamelCaseHTTPServer",
    "XMLHttpRequest'S", "if (x<=y&&!z){\n\treturn a->b[0];\t// ok\r\n}\n", "\\frac{1}{2} \\alpha_{i}^{2} $$",
    '<html><body class="x">&nbsp;</body></html>\n\n\n', "https://a.b/c?d=e&f=%20#g user@host.com",
    "!!!???...---===***///\\\\\\ ///\n", "«»“”‘’…—–·•", "a" * 300, "ab " * 50, "é" * 100,
    "nul\0 inside \x01\x1b[31mred\x7f",
)  # fmt: skip
TOKENS = (
    "<|endoftext|><|im_end|><|eot_id|></s><bos><start_of_turn>user\n<eos>[INST]<unk><0x41><|return|><think>",
    "▁▁ a▁b ▁c", "Ġword Ċ Â", "<table><tr>[multimodal]<unused7><|reserved_special_token_3|>",
)  # fmt: skip
NASTY = (*SPACES, *MARKS, *SCRIPTS, *NUMBERS, *WORDS, *TOKENS)
_BETWEEN = ("", " ", "\n", "\n\n", "\r\n", "\t")


def long_nasty_text(seed: int, texts: int) -> str:
    """Many of them one after the other, in any order."""
    drawn = random.Random(seed)
    return "".join(drawn.choice(NASTY) + drawn.choice(_BETWEEN) for _ in range(texts))
