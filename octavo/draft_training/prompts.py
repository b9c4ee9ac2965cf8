"""Built-in prompts for training draft heads, for users without data: tasks times subjects.

A head learns from the model's own answers, so the questions need none. They are of the kinds that
people ask: explanations, lists, stories, letters, code, sums, JSON, rewriting. The openings are for
models without a chat template.
"""

from __future__ import annotations

import random
from collections.abc import Callable

_TASKS = (
    "What is {}?",
    "Tell me about {}.",
    "Explain {} to a child.",
    "Explain how {} came to be what it is today.",
    "Give me five facts about {}.",
    "Write a short story in which {} matters.",
    "Write a poem about {}.",
    "List the advantages and disadvantages of {}.",
    "Why do people care about {}?",
    "Write an email to a colleague in which you ask for help with {}.",
    "Write a short speech on {} for a school.",
    "What are common mistakes of beginners when it comes to {}?",
    "I want to learn about {}. Where should I start? Give me a plan in steps.",
    "Write a dialogue between a teacher and a pupil about {}.",
    "Give me a title and three section headings for an article on {}.",
    "What would the world be like without {}?",
    "Describe {} as if you saw it for the first time.",
    "Summarize in one paragraph what everybody should know about {}.",
    "Ask me three quiz questions about {}, and give the answers.",
    "Make a JSON object with the fields name, description and tags about {}.",
    "Make a table in Markdown that compares {} with something similar.",
    "Write a product description for something that has to do with {}.",
    "What questions should I ask an expert on {}?",
    "How has {} changed in the last hundred years?",
)
_SUBJECTS = (
    *("gravity", "photosynthesis", "bread", "the French Revolution", "jazz", "chess", "rain"),
    *("the moon", "bicycles", "honey bees", "democracy", "the internet", "volcanoes", "sleep"),
    *("coffee", "public libraries", "the Roman Empire", "electric cars", "gardening", "money"),
    *("vaccines", "the Silk Road", "whales", "mathematics", "friendship", "running", "glass"),
    *("machine learning", "earthquakes", "the theatre", "rivers", "cheese", "statistics"),
    *("the human heart", "solar power", "poetry", "tea", "bridges", "the printing press"),
    *("antibiotics", "mountains", "football", "recycling", "dreams", "the stock market"),
    *("trees", "languages", "black holes", "cooking rice", "the piano", "deserts", "maps"),
    *("cats", "trains", "the alphabet", "evolution", "time zones", "pottery", "insurance"),
    *("job interviews", "public speaking", "databases", "the periodic table", "winter"),
    *("swimming", "a healthy breakfast", "old clocks", "lighthouses", "computer viruses"),
    *("the law", "batteries", "camping", "novels", "migration", "salt", "working from home"),
    *("photography", "dinosaurs", "city parks", "the Olympic Games", "memory", "paper"),
)
_CODE = (
    "Write a Python function that {}.",
    "Write a Python function that {}, with a docstring and an example.",
    "How do I {} in JavaScript?",
    "Explain step by step how a program {}, and show the code.",
)
_CODE_SUBJECTS = (
    *("reverses a string", "sorts a list of numbers", "counts the words of a text"),
    *("finds the largest number of a list", "checks whether a number is prime"),
    *("reads a CSV file", "removes duplicates from a list", "computes a factorial"),
    *("checks whether a word is a palindrome", "merges two dictionaries"),
    *("converts Celsius to Fahrenheit", "finds the most frequent letter of a text"),
    *("adds up the numbers of a file", "makes a list of Fibonacci numbers"),
    *("searches a sorted list", "checks whether brackets match", "draws a random password"),
    *("parses a date", "transposes a matrix", "downloads a web page"),
)
_SUMS = (
    "A box has {} apples and {} people share them. How many does each get, and how many are left?",
    "What is {} plus {}? Show your work.",
    "A train goes {} kilometres in {} hours. How fast is it?",
    "Anna has {} coins and gives away {}. How many has she left?",
    "A shop sells a shirt for {} dollars, and I buy {} of them. What do I pay?",
)
_PASSAGES = (
    "The old mill at the edge of the village had not turned for forty years. Last spring two "
    "sisters bought it, repaired the wheel, and began to grind flour again. People come from "
    "far to see it.",
    "Our team met on Monday. We agreed to move the release to the end of May, because the "
    "tests of the payment page are not ready. Maria writes to the customers, and Tom repairs "
    "the tests.",
    "Water expands when it freezes, which few substances do. Ice is therefore lighter than "
    "water and swims on it, and lakes freeze from above. Fish survive the winter in the water "
    "below.",
    "The museum opens at nine in the morning and closes at six. Tickets cost eight dollars, "
    "and four for students. On the first Sunday of each month everybody gets in for free.",
    "he dont know where the station are, so he ask a woman that was walking with her dog, and "
    "she tell him that he have to go back two street and than left.",
)
_PASSAGE_TASKS = (
    "Summarize this text in one sentence: {}",
    "Rewrite this text so that it sounds more formal: {}",
    "Correct the grammar of this text, and repeat the whole text: {}",
    "List the most important facts of this text: {}",
    "Turn this text into a short letter to a friend: {}",
    "What follows from this text? {}",
)
_OPENINGS = (
    "The history of {} begins",
    "In this article we look at {}.",
    "It is often said that {}",
    "Chapter 1: {}\n\n",
    "Q: What is {}?\nA:",
    "Yesterday I read something about {}, and",
    "There are three reasons why {}",
    "# {}\n\n",
)


def questions(count: int, seed: int) -> list[str]:
    """Draw ``count`` user messages by ``seed``, without repetition as far as there are enough."""
    draw = random.Random(seed)
    kinds = (
        lambda: draw.choice(_TASKS).format(draw.choice(_SUBJECTS)),
        lambda: draw.choice(_CODE).format(draw.choice(_CODE_SUBJECTS)),
        lambda: draw.choice(_SUMS).format(draw.randint(2, 99), draw.randint(2, 12)),
        lambda: draw.choice(_PASSAGE_TASKS).format(draw.choice(_PASSAGES)),
    )
    return _distinct(lambda: draw.choices(kinds, (12, 3, 2, 3))[0](), count)


def openings(count: int, seed: int) -> list[str]:
    """Draw ``count`` beginnings of texts by ``seed``, likewise."""
    draw = random.Random(seed)
    return _distinct(lambda: draw.choice(_OPENINGS).format(draw.choice(_SUBJECTS)), count)


def _distinct(make: Callable[[], str], count: int) -> list[str]:
    """Collect distinct results of ``make``; they repeat once new ones become rare."""
    found: dict[str, None] = {}
    for _ in range(4 * count):
        if len(found) == count:
            break
        found.setdefault(make())
    listed = list(found)
    return [listed[index % len(listed)] for index in range(count)]
