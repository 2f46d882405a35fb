"""Print prompts put together from parts: code, chat and math, to train a drafter with when there are none of your own.

    python tools/made_prompts.py 600 > prompts.jsonl

Writes that many of each category, in turns, one JSON object a line (id, category, prompt); the same number and seed
(7, or a second argument) give the same lines. Parts and forms are this project's own (Apache-2.0); none of the bundled
bench prompts is among them.
"""

import json
import random
import sys
from collections.abc import Callable

VALUES = ["list of integers", "list of strings", "string", "dictionary", "matrix", "sorted list", "linked list"]
VALUES += ["list of tuples", "CSV file", "text file", "JSON string", "binary tree", "log file", "set of words"]
GOALS = {
    "list of integers": "sums the even numbers;finds the second largest value;removes duplicates but keeps the order;"
    "moves all zeros to the end;splits it into chunks of n;finds the longest increasing run;rotates it by k places;"
    "counts how often each value occurs;finds two numbers that add up to a target;computes a running average",
    "list of strings": "groups them by first letter;finds the longest one;sorts them by length, then by alphabet;"
    "joins them with commas and a final 'and';removes those with digits;counts the vowels in each;groups the anagrams",
    "string": "reverses the order of the words;checks whether it is a palindrome;counts each character;"
    "turns snake_case into camelCase;checks that the brackets are balanced;compresses runs of equal letters;"
    "finds the first character that is not repeated;validates an e-mail address;parses a date such as 2024-03-17",
    "dictionary": "swaps keys and values;merges it with another one, adding the numbers;sorts it by value;"
    "flattens nested levels into dotted keys;returns the n keys with the largest values;drops entries that are None",
    "matrix": "transposes it;rotates it by ninety degrees;sums each row and column;walks through it in a spiral;"
    "finds the path with the smallest sum;multiplies it with another one;counts islands of ones",
    "sorted list": "searches a value by bisection;inserts a value at its place;merges it with another sorted list;"
    "finds the first value not below x;removes all values outside a range",
    "linked list": "reverses it;finds its middle node;detects a cycle;removes the n-th node from the end;merges two",
    "list of tuples": "sorts by the second item;groups by the first item;finds the pair with the largest product;"
    "turns it into a dictionary of lists;merges overlapping intervals",
    "CSV file": "sums one column;prints the rows where a column is empty;converts it to JSON;joins it with another one;"
    "computes the mean and the median of a column;writes only the rows above a threshold to a new file",
    "text file": "counts lines, words and characters;prints the ten most frequent words;replaces tabs with spaces;"
    "prints the lines that contain a pattern, with numbers;removes empty lines",
    "JSON string": "checks that all needed keys are there;prints it with sorted keys;collects all values of a key;"
    "compares it with another one and lists the differences",
    "binary tree": "computes its depth;lists its values level by level;checks whether it is a search tree;"
    "finds the lowest common ancestor of two nodes;mirrors it;serialises it to a string and back",
    "log file": "counts the errors per hour;finds the slowest request;lists the addresses with most requests;"
    "keeps only the last hundred lines",
    "set of words": "finds those that are spelled the same backwards;finds all pairs that differ in one letter;"
    "builds a trie and looks up a prefix;suggests the closest word to a misspelled one",
}
CODE_FORMS = [
    "Complete this task in {language}: given a {value}, the function `{name}` {goal}. Only code, please.",
    "Write a {language} function with type annotations and comments. It takes a {value} and {goal}.",
    "A beginner asks how to write a {language} function that takes a {value} and {goal}. Answer with code and a short "
    "explanation of each line.",
    "Write a {language} function that takes a {value} and {goal}.",
    "Write a {language} function that, given a {value}, {goal}. Add a docstring or comment and an example call.",
    "How do I write {language} code that {goal}? The input is a {value}. Explain the idea in two sentences first.",
    "I need a small {language} program. It reads a {value} and {goal}. Handle empty input without a crash.",
    "Write `{name}` in {language}: it takes a {value} and {goal}. Then write three unit tests for it.",
    "Here is my task: take a {value}; the code {goal}. Show a simple version in {language} and say what its running "
    "time is.",
]
LANGUAGES = ["Python"] * 7 + ["JavaScript"] * 3 + ["Java", "Go", "C++", "Rust", "TypeScript"]
NAMES = ["solve", "process", "transform", "run_task", "handle_input", "compute", "apply_rule", "helper"]
CLASSES = ["bank account", "shopping cart", "parking garage", "library with books and readers", "stack", "queue"]
CLASSES += ["thermostat", "playlist", "timer", "inventory of a shop", "cache with a maximum size", "chess clock"]
CLASSES += ["matrix with addition and multiplication", "polynomial", "priority queue", "state machine of a lamp"]
TABLES = ["customers and orders", "books and authors", "employees and departments", "students and grades"]
TABLES += ["flights and airports", "products and suppliers", "patients and visits", "songs and albums"]
QUERIES = ["the ten largest of them", "those without any match in the other table", "the number for each month"]
QUERIES += ["the average per group, with groups under five left out", "the latest entry of each", "all duplicates"]
EXPLAIN = ["recursion", "a decorator", "a generator", "list comprehensions", "exceptions", "a virtual environment"]
EXPLAIN += ["async and await", "type hints", "a hash table", "big-O notation", "unit tests", "dependency injection"]
EXPLAIN += ["a REST API", "regular expressions", "git rebase", "a race condition", "closures", "context managers"]

TOPICS = ["sleep", "running", "a balcony garden", "a first job interview", "learning Spanish", "baking bread"]
TOPICS += ["saving money", "a move to another city", "stage fright", "a book club", "teaching a child to read"]
TOPICS += ["a camping trip", "a small flat", "working from home", "a vegetable soup", "a city by the sea", "volcanoes"]
TOPICS += ["the night sky", "bees", "old bicycles", "coffee", "chess", "birds in winter", "photography", "the ocean"]
TOPICS += ["public libraries", "a noisy neighbour", "a lost dog", "train journeys", "rain", "a power cut", "friendship"]
TOPICS += ["honesty", "patience", "getting up early", "a school play", "a farmers' market", "recycling", "mountains"]
TOPICS += ["a garden in autumn", "learning the guitar", "a night at the airport", "the first snow", "a birthday party"]
TOPICS += ["a long letter", "cooking for six people", "the smell of books", "a bus that is always late", "gratitude"]
TOPICS += ["a new neighbour", "the moon", "painting a room", "an old clock", "a football match", "a lost key", "jazz"]
TOPICS += ["a walk in the forest", "giving a speech", "a cat and a dog", "the desert", "a school garden", "time zones"]
TOPICS += ["a difficult colleague", "homework", "a summer job", "the invention of paper", "a village without internet"]
TOPICS += ["good manners", "a broken promise", "museums", "a bridge", "wind power", "a picnic", "handwriting", "dreams"]
TOPICS += ["the history of bread", "electric cars", "a broken phone", "meditation", "board games", "swimming", "tea"]
CHAT_FORMS = [
    "Give me five tips about {topic}.",
    "Write a short story about {topic}.",
    "Write a poem of eight lines about {topic}.",
    "What should a beginner know about {topic}?",
    "Explain {topic} to a child of ten years.",
    "Write a friendly e-mail to a friend about {topic}.",
    "What are the advantages and disadvantages of {topic}? Keep it short.",
    "I have been thinking about {topic} a lot. What questions would you ask me?",
    "Write the first paragraph of an article about {topic}.",
    "Make a plan for one week that has to do with {topic}.",
    "Write a dialogue between two people who disagree about {topic}.",
    "Describe {topic} in three sentences without using the word itself.",
    "What is a common mistake people make with {topic}, and how can it be avoided?",
    "Suggest a title and an outline for a talk about {topic}.",
    "My sister and I argue about {topic}. How could we talk about it calmly?",
    "Tell me something surprising about {topic}.",
    "Write a diary entry about {topic}.",
    "How would you explain {topic} to someone who has never heard of it?",
    "Write a short review of a book about {topic}.",
    "What would life be like without {topic}?",
    "List the steps that somebody new to {topic} should take, with one sentence for each.",
    "Write a speech of one minute about {topic}.",
    "Write a letter to the editor about {topic}.",
    "Compare {topic} with something that looks quite different at first.",
]
PEOPLE = ["Maria", "Tom", "Aisha", "Jonas", "Lena", "Ravi", "Chloe", "Diego", "Hana", "Peter", "Sofia", "Omar"]
THINGS = ["apples", "pencils", "tickets", "eggs", "stickers", "chairs", "bottles", "books", "marbles", "candles"]
PLACES = ["market", "school", "bakery", "library", "garden centre", "fair", "warehouse", "museum"]


def code(draw: random.Random) -> str:
    kind = draw.random()
    if kind < 0.72:
        value = draw.choice(VALUES)
        goal = draw.choice(GOALS[value].split(";"))
        form, language, name = draw.choice(CODE_FORMS), draw.choice(LANGUAGES), draw.choice(NAMES)
        return form.format(value=value, goal=goal, language=language, name=name)
    if kind < 0.84:
        return f"Write a {draw.choice(LANGUAGES)} class for a {draw.choice(CLASSES)} and show how to use it."
    if kind < 0.92:
        return f"I have two SQL tables, {draw.choice(TABLES)}. Write a query that returns {draw.choice(QUERIES)}."
    return f"Explain {draw.choice(EXPLAIN)} with a short {draw.choice(LANGUAGES)} example."


def chat(draw: random.Random) -> str:
    return draw.choice(CHAT_FORMS).format(topic=draw.choice(TOPICS))


def math(draw: random.Random) -> str:
    a, b, c, d = (draw.randint(2, 12), draw.randint(3, 30), draw.randint(2, 9), draw.randint(20, 300))
    who, other = draw.sample(PEOPLE, 2)
    thing, place, price = draw.choice(THINGS), draw.choice(PLACES), round(draw.randint(5, 400) / 20, 2)
    forms = [
        f"{who} buys {b} {thing} at the {place} for {price} dollars each and gives {a} of them to {other}. "
        f"How much did the {thing} that are left cost?",
        f"A {place} sells {d} {thing} on Monday and {c} times as many on Tuesday. How many did it sell on both days?",
        f"{who} reads {b} pages a day. How many days does a book of {d + 60} pages take, and how many pages are left "
        "for the last day?",
        f"Solve for x: {a}x + {b} = {a * c + b}. Show each step.",
        f"Solve for x: {c}(x - {a}) = {d}. Check the answer.",
        f"Find the area and the perimeter of a rectangle with sides {b} cm and {c} cm.",
        f"What is {c * 5}% of {d}? Explain how you get it.",
        f"{who} and {other} share {d} {thing} in the ratio {a}:{c}. How many does each get?",
        f"A train travels {d} km in {c} hours. How far does it go in {a} hours at the same speed?",
        f"Two dice are thrown. What is the probability that the sum is {a}? Show your reasoning.",
        f"Simplify the fraction {a * c}/{b * c} and write it as a decimal.",
        f"Solve the equations x + y = {b + c} and x - y = {b - c}.",
        f"Find the roots of x^2 - {a + c}x + {a * c} = 0.",
        f"What is the sum of the whole numbers from 1 to {d}?",
        f"{who} saves {price} dollars every week. After how many weeks does {who} have {d} dollars?",
        f"A recipe for {c} people needs {b * 10} g of flour. How much flour is needed for {a} people?",
        f"Find the derivative of f(x) = {a}x^3 - {c}x^2 + {b}.",
        f"The price of a coat falls from {d} dollars by {c * 5} percent. What does it cost now?",
        f"A tank holds {d} litres and loses {c} litres an hour. How much is left after {a} hours?",
        f"How many ways are there to choose {min(a, c)} of {max(a, c) + 3} {thing}?",
    ]
    return draw.choice(forms)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    draw = random.Random(int(sys.argv[2]) if len(sys.argv) > 2 else 7)
    seen: set[str] = set()
    makers: dict[str, Callable[[random.Random], str]] = {"code": code, "chat": chat, "math": math}
    for number in range(count):
        for category, make in makers.items():
            prompt = make(draw)
            for _ in range(200):
                if prompt not in seen:
                    break
                prompt = make(draw)
            if prompt in seen:
                sys.exit(f"made_prompts.py: no more than {number} different prompts of {category}; ask for fewer")
            seen.add(prompt)
            print(json.dumps({"id": f"made-{category}-{number:04d}", "category": category, "prompt": prompt}))


if __name__ == "__main__":
    main()
