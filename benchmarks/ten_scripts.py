"""Short paragraphs in ten scripts, written for this benchmark, and long odd texts made from their words."""

from __future__ import annotations

import random

PARAGRAPHS = {
    "Latin": (
        "Am frühen Morgen gehen wir über die alte Brücke zum Markt. Die Händlerin verkauft Äpfel, Käse und süßes Brot. "
        "Für zwölf Euro bekommt man dort fast alles, außer Ruhe. Später regnet es, und die Gassen glänzen grün."
    ),
    "Cyrillic": (
        "Рано утром мы идём по старому мосту на рынок. Торговка продаёт яблоки, сыр и сладкий хлеб. "
        "За двенадцать рублей там можно купить почти всё, кроме тишины. Потом идёт дождь, и улицы блестят."
    ),
    "Greek": (
        "Νωρίς το πρωί περνάμε την παλιά γέφυρα και πάμε στην αγορά. Η γυναίκα πουλάει μήλα, τυρί και γλυκό ψωμί. "
        "Με δώδεκα ευρώ αγοράζεις σχεδόν τα πάντα, εκτός από ησυχία. Αργότερα βρέχει και οι δρόμοι λάμπουν."
    ),
    "Arabic": (
        "في الصباح الباكر نمشي فوق الجسر القديم إلى السوق. تبيع المرأة التفاح والجبن والخبز الحلو. "
        "باثني عشر دينارا تشتري هناك كل شيء تقريبا، إلا الهدوء. ثم ينزل المطر وتلمع الشوارع."
    ),
    "Hebrew": (
        "מוקדם בבוקר אנחנו הולכים על הגשר הישן אל השוק. האישה מוכרת תפוחים, גבינה ולחם מתוק. "
        "בשנים עשר שקלים אפשר לקנות שם כמעט הכול, חוץ משקט. אחר כך יורד גשם והרחובות נוצצים."
    ),
    "Devanagari": (
        "सुबह जल्दी हम पुराने पुल से बाज़ार जाते हैं। वह औरत सेब, पनीर और मीठी रोटी बेचती है। "
        "बारह रुपये में वहाँ लगभग सब कुछ मिलता है, शांति को छोड़कर। फिर बारिश होती है और गलियाँ चमकती हैं।"
    ),
    "Chinese": (
        "清晨，我们走过那座老桥去市场。那位妇人卖苹果、奶酪和甜面包。十二块钱几乎什么都能买到，除了安静。"
        "后来下起了雨，街道闪闪发光。孩子们在屋檐下等着，数着经过的船。"
    ),
    "Japanese": (
        "朝早く、私たちは古い橋を渡って市場へ行きます。女の人がりんごとチーズと甘いパンを売っています。"
        "十二ユーロあれば、静けさのほかは何でも買えます。やがて雨が降り、通りがきらきら光ります。"
    ),
    "Korean": (
        "이른 아침에 우리는 오래된 다리를 건너 시장에 갑니다. 아주머니는 사과와 치즈와 달콤한 빵을 팝니다. "
        "열두 유로면 고요함 말고는 거의 다 살 수 있습니다. 나중에 비가 오고 골목이 반짝입니다."
    ),
    "Thai": (
        "เช้าตรู่เราเดินข้ามสะพานเก่าไปตลาด ผู้หญิงคนนั้นขายแอปเปิล ชีส และขนมปังหวาน "
        "เงินสิบสองบาทซื้อได้เกือบทุกอย่าง ยกเว้นความเงียบ แล้วฝนก็ตก ถนนจึงเป็นประกาย"
    ),
}
MARKS = ["👩‍🔬", "👍🏽", "🇩🇪", "e\u0301", "a\u0308\u0323", "क\u094dष", "\u200d", "\u200b"]  # emoji and combining marks
JOINTS = {" ": 60, ", ": 12, ". ": 9, "\n": 8, "\n\n": 4, "\r\n": 1, "  ": 3, "": 3}  # and how often


def words_in(script: str) -> list[str]:
    """The words of a paragraph; where a script has no spaces, all runs of two to five characters."""
    text = PARAGRAPHS[script]
    if script not in ("Chinese", "Japanese", "Thai"):
        return text.split()
    return [text[i : i + length] for length in range(2, 6) for i in range(len(text) - length)]


def prose(script: str, characters: int, seed: int = 0) -> str:
    """Words in a seeded order, with whole paragraphs, numbers, marks and odd spaces between them."""
    chooser, words = random.Random(seed), words_in(script)
    parts, length = list[str](), 0
    while length < characters:
        joint = chooser.choices(list(JOINTS), list(JOINTS.values()))[0]
        odd = chooser.random()
        if odd < 0.01:
            word = chooser.choice(MARKS)
        elif odd < 0.04:
            word = str(chooser.randrange(10**6))
        else:
            word = PARAGRAPHS[script] if odd > 0.99 else chooser.choice(words)
        parts.append(word + joint)
        length += len(parts[-1])
    return "".join(parts)
