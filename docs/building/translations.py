"""The labels of the drawings in the languages of the site's other pages."""

import re

TRANSLATIONS = {
    "zh-Hans": {
        r"C = (\d+) slots of c = (\d+)": r"C = \1 个槽，c = \2",
        r"the last output sees (\d+) tokens": r"最后一个输出能看到 \1 个词元",
        r"padded; read on from the line": "补一列零，从竖线处重新读取",
        r"products by distance": "各距离的乘积",
        r"products by key": "各键的乘积",
        r"compressed memory": "压缩记忆",
        r"memory": "记忆",
        r"forgotten": "已遗忘",
        r"segment (\d+)": r"片段 \1",
        r"segment": "当前片段",
        r"position": "位置",
        r"layer (\d+)": r"第 \1 层",
        r"tokens": "词元",
        r"also ": "另有 ",
    },
    "si": {
        r"C = (\d+) slots of c = (\d+)": r"කට්ට C = \1, c = \2",
        r"the last output sees (\d+) tokens": r"අවසාන ප්‍රතිදානයට ටෝකන \1ක් පෙනේ",
        r"padded; read on from the line": "තීරුවක් එකතු කළ පසු",
        r"products by distance": "දුර අනුව ගුණිත",
        r"products by key": "යතුර අනුව ගුණිත",
        r"compressed memory": "සම්පීඩිත මතකය",
        r"memory": "මතකය",
        r"forgotten": "අමතක වූ",
        r"segment (\d+)": r"කොටස \1",
        r"segment": "කොටස",
        r"position": "ස්ථානය",
        r"layer (\d+)": r"ස්තරය \1",
        r"tokens": "ටෝකන",
        r"also ": "තවද ",
    },
}
"""By language: patterns of English labels, longer ones first, and what replaces them."""

LABEL = re.compile(r"(?<=>)[^<>]+(?=</text>)")


def translated(drawing: str, language: str) -> str:
    def in_language(label: re.Match[str]) -> str:
        text = label[0]
        for english, other in TRANSLATIONS[language].items():
            text = re.sub(english, other, text)
        return text

    return LABEL.sub(in_language, drawing.replace("<svg ", f'<svg xml:lang="{language}" ', 1))
