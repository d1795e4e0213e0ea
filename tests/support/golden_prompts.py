"""The texts that the golden answers of the two trained models begin with.

`DEMO` is for the demo model: a str is continued as it is, a list of messages goes through the chat template.
`GLASSLLM` is for glassllm, which reads characters and knows little but storybook English.
"""

LETTER = """Dear Ms Holloway,

Thank you for the three boxes of seed potatoes, which came on Thursday in good order apart from a few \
that had begun to sprout on the way. We planted the early ones along the south wall on the same evening, \
because the forecast spoke of a dry week, and kept the others in the shed until the lower field has \
drained. The old fence by the stream did not survive the winter. My brother wants to replace it with a \
hedge of hawthorn, and I would rather have a proper wall, so we shall probably end up with neither before \
the autumn. The school has asked again whether the children may come and help with the harvest, as they \
did last year. I said that they may, provided that somebody counts the baskets this time. Please let me \
know when you intend to visit us, and whether you would like to stay in the house or in the cottage \
behind the orchard.

With kind regards,"""

REPORT = """Summary of the inspection

The bridge was inspected on foot and by boat. The deck is sound, and the railing on the upstream side was \
painted recently. Two of the five piers show cracks at the water line, the longest of them about as long \
as a hand. The cracks are older than the last inspection, but they have not been measured before, so \
nobody can say whether they grow. The bearings on the eastern bank are dry and should be greased before \
the frost. Some gravel has been washed away from the foot of the second pier; divers should look at it in \
the spring, when the water is low. The drains are blocked by leaves. None of this calls for closing the \
bridge, but heavy lorries should use the other road until the piers have been examined.

Recommendations

"""

CODE = '''class Basket:
    """Things with a price."""

    def __init__(self):
        self.items = {}

    def add(self, name, price, count=1):
        if price < 0:
            raise ValueError("a price is never negative")
        _, before = self.items.get(name, (price, 0))
        self.items[name] = (price, before + count)

    def remove(self, name):
        if name not in self.items:
            raise KeyError(name)
        del self.items[name]

    def total(self):
        return sum(price * count for price, count in self.items.values())


basket = Basket()
basket.add("apple", 0.5, 4)
basket.add("bread", 2.25)
print('''


def chat(*turns: str, system: str | None = None) -> list[dict[str, str]]:
    """Turns of user and assistant, the user's first."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for place, text in enumerate(turns):
        messages.append({"role": "assistant" if place % 2 else "user", "content": text})
    return messages


DEMO: list[str | list[dict[str, str]]] = [
    "The capital of France is",
    "Once upon a time",
    "The",
    "A",
    "Water boils when",
    "My grandmother always told me that",
    "The three most important things about writing well are",
    "In the beginning of the twentieth century, most people travelled by",
    "Ingredients: flour, butter, sugar, eggs.\nMethod:\n1.",
    "- apples\n- pears\n- plums\n-",
    "Monday, Tuesday, Wednesday,",
    "one two three four five six",
    "1, 2, 3, 4, 5, 6, 7,",
    "The year 1969 is remembered because",
    "2 + 2 = 4\n3 + 3 = 6\n4 + 4 =",
    "def fibonacci(n):\n",
    "#include <stdio.h>\n\nint main(void) {\n",
    "SELECT name, price FROM products WHERE",
    '{"name": "Ada", "age": 36, "languages": ["English",',
    "<ul>\n  <li>First</li>\n  <li>",
    "Q: What do bees make?\nA:",
    "Anna: Did you bring the map?\nBen: No, I left it on the train.\nAnna:",
    "Le petit chat dort sur",
    "Der Zug fährt um acht Uhr ab und",
    "El perro corre por la",
    "Photosynthesis is the process by which plants",
    "    four spaces, then",
    "A line.\n\nAnother line.\n\n",
    "To whom it may concern:\n\nI am writing to",
    "🌧️ ☀️ The weather today",
    "https://example.org/",
    "THE QUICK BROWN FOX",
    "dogs cats dogs cats dogs cats dogs",
    LETTER,
    REPORT,
    CODE,
    chat("Explain in one sentence what a cache is."),
    chat("Hello!"),
    chat("Write a haiku about rain."),
    chat("List three colours."),
    chat("Name two animals that live in the sea and one that lives on land."),
    chat("Translate to French: good morning"),
    chat("What is a library?"),
    chat("Give me a title for a story about a lighthouse keeper."),
    chat("Rewrite more politely: Send me the file now."),
    chat("Write a Python function that reverses a string."),
    chat("Describe the sea to somebody who has never seen it."),
    chat("Is the sun a star? Answer with yes or no."),
    chat("Continue: The door opened slowly, and"),
    chat("What rhymes with light?"),
    chat("Write an email that asks for a day off."),
    chat("Who are you?", system="You are a pirate who answers in one short sentence."),
    chat("How do I boil an egg?", system="Answer in exactly three steps."),
    chat("My name is Tom.", "Nice to meet you, Tom! How can I help?", "What is my name?"),
    chat("I like tea.", "Tea is lovely.", "And coffee?", "Coffee is lovely too.", "Which has more caffeine?"),
    chat("Summarise this letter in one sentence.\n\n" + LETTER),
    chat("What should be done first?\n\n" + REPORT, system="You are a careful engineer."),
]

GLASSLLM = [
    "The Queen",
    "Once upon a time",
    "Alice was",
    "the",
    "It was a",
    "said the King",
    "There was a little girl who",
    "In the morning they",
    "The old man went to the",
    '"I do not know," said',
    "What is",
    "She looked at the",
    "He had never seen such a",
    "When the sun rose, the",
    "and then",
    "They lived in a small house by the",
    "The wolf said to the",
    "One day the prince",
    "Nobody could tell",
    "The cat sat on the table, and the dog",
    "Please, sir, may I have",
    "Down, down, down",
    "At last they came to a great door, and behind it they heard somebody",
    "X",
]
