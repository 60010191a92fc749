"""Prompts of our own, so that a benchmark runs without any data: English, code, mathematics, translation."""

from __future__ import annotations

OWN_PROMPTS = (
    "Write a short story about a baker who finds an old map inside a bag of flour.",
    "Write a Python function that returns the n-th Fibonacci number without recursion, and explain each line.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Explain each step.",
    "Translate into French: The library is closed on Mondays, but you can return your books at the side door.",
    "Explain to a ten-year-old how a rainbow is made.",
    "Write a Python class for a bank account with deposit, withdraw and a balance that never becomes negative.",
    "A shop sells pens at 1.20 each and gives one free pen for every five bought. What do 18 pens cost?",
    "Translate into Spanish: My sister has lived in a small village near the sea since she was six years old.",
    "Give me five tips for sleeping better, with one sentence of reason for each.",
    "Write a SQL query that lists the three customers with the highest total of orders in the last year.",
    "What is the sum of all whole numbers from 1 to 200? Show how you found it.",
    "Translate into German: Please switch off the lights when you leave the room, and lock the door behind you.",
    "Write a polite letter to a landlord about a heating that has not worked for two weeks.",
    "Write a JavaScript function that checks whether a text is a palindrome, ignoring spaces and case.",
    "A rectangle is twice as long as it is wide and has a perimeter of 54 cm. How large is its area?",
    "Translate into Italian: Tomorrow we will meet in front of the station and walk to the museum together.",
    "Compare tea and coffee: taste, effect and history, in three short paragraphs.",
    "Explain the difference between a process and a thread, with an example of when to use each.",
    "Three friends share 84 marbles in the ratio 2:3:7. How many does each one get?",
    "Summarise the following text in one sentence: Honey bees tell one another where flowers are by dancing. The angle "
    "of the dance shows the direction relative to the sun, and its length shows how far the flowers are.",
    "Plan a day in a city that you like, hour by hour, for somebody who has never been there.",
    "Write a shell script that renames every .jpeg file in a folder to .jpg and prints how many it renamed.",
    "If a car uses 6.5 litres for 100 km, how much fuel does it need for 340 km? Round to one decimal place.",
    "List the steps for growing tomatoes on a balcony, from seed to harvest.",
)
