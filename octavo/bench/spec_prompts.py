"""What is asked when drafters are measured: texts that repeat what they were given, and texts that
do not. Written for this purpose.

Copying is what tasks on a given text have in common: an answer is that text (``copy``), quotes it
(``summary``, ``rag``), or is it again with changes (``edit``, ``json``). A conversation (``chat``)
hardly copies. What follows
random tokens is made by the benchmark itself, of the vocabulary of the model.
"""

from __future__ import annotations

_LIBRARY = """\
The town library will close its reading room on the first floor from 3 March to 28 March. During
these weeks the wooden floor is replaced and the lamps above the long tables are exchanged for ones
that use a third of the power. Newspapers and magazines move to the foyer, where twelve chairs are
available. Books that were reserved can be collected at the side entrance on Mill Lane between nine
in the morning and six in the evening. Loans that end in March are extended to 4 April without any
action by the reader, and no fees are charged for them. The children's section is not affected."""

_BRIDGE = """\
The inspection of the Harrow Bridge took place on 14 May in dry weather. All forty-two bearings were
examined from the maintenance platform. Bearings 7, 19 and 20 on the north side show corrosion that
reduces their section by less than five per cent; they should be cleaned and coated before winter.
The expansion joint at the east end has a tear of eleven centimetres in its rubber profile, through
which water reaches the abutment. The joint must be replaced within six months. The railings, the
drainage and the deck were found to be in good order. The next inspection is due in three years."""

_BREAD = """\
Mix 500 grams of wheat flour with 350 grams of water and let the dough rest for half an hour. Then
add 10 grams of salt and 100 grams of sourdough, and knead for eight minutes until the dough is
smooth and no longer sticks to the bowl. Cover it and let it rise for four hours at room
temperature, folding it once every hour. Shape a round loaf, put it into a floured basket and leave
it in the refrigerator overnight. Heat the oven with a cast-iron pot inside to 250 degrees. Bake the
loaf in the covered pot for 25 minutes, take off the lid, and bake it for 20 minutes more."""

_PUMP = """\
Before you open the housing of the pump, switch off the main breaker and wait at least five minutes
until the capacitors have discharged. Close the inlet valve first and the outlet valve afterwards.
Loosen the six bolts of the cover crosswise. If the impeller cannot be turned by hand, remove the
sediment with a soft brush and clean water; do not use solvents, since they damage the seal. Check
the seal for cracks. A seal that is older than two years is always replaced. Tighten the bolts
crosswise with a torque of 12 newton metres, open both valves, and let the pump run for one minute
before you close the drain."""

_COMPANY = """\
In the third quarter the company sold 18,400 bicycles, 7 per cent more than in the same quarter of
the year before. Revenue rose to 21.6 million euros, while the operating margin fell from 9.1 to 8.4
per cent because of higher prices for aluminium and freight. Electric bicycles made up 46 per cent
of revenue. The new plant in Zwolle began production in August and is expected to reach its planned
output of 300 bicycles a day in February. The board confirms its forecast for the year: revenue
between 82 and 85 million euros, and an operating margin of about 8.5 per cent."""

_HERON = """\
The grey heron is found near shallow water in most of Europe. It stands up to a metre tall and
weighs between one and two kilograms. Herons hunt mainly at dawn and at dusk, when they wait without
moving until a fish, a frog or a vole comes within reach of the long bill. They nest in colonies
high up in trees, often in nests that were used in the year before, and lay three to five eggs in
March or April. Both parents sit on the eggs for about twenty-five days. The young leave the nest
after seven weeks. In hard winters, when ponds freeze over, many herons move to the coast."""

_MEETING = """\
Present were Ana Ruiz, Tom Becker, Priya Nair and Lars Holm. Ana reported that the migration of the
customer database is finished and that the old servers can be switched off on Friday. Tom asked for
two more weeks to test the invoices, because rounding differs between the old and the new program
in about one case in a thousand. It was decided that invoices stay on the old program until 30 June.
Priya presented three designs for the start page; the second was chosen, with a larger search field.
Lars will ask two printers for offers on the manual. The next meeting is on 19 June at ten."""

_LEASE = """\
The tenant may end the lease with a notice of three months to the end of any month. The landlord may
end it only for a reason that the law allows, and has to give the reason in writing. The rent is due
on the third working day of each month. If the tenant is more than ten days late twice within one
year, the landlord may ask for a deposit of one further monthly rent. Repairs that cost less than
120 euros are paid by the tenant, up to a total of 400 euros in a year. Pets other than small
animals in cages need the landlord's consent, which may not be refused without a good reason."""

_COPY = tuple(
    f"Repeat the following text word for word, without any comment.\n\n{text}"
    for text in (_LIBRARY, _BRIDGE, _BREAD, _PUMP, _COMPANY, _HERON, _MEETING, _LEASE)
)

_SUMMARY = tuple(
    f"{task}\n\n{text}"
    for task, text in (
        ("Summarize the report. Use its own sentences, and leave out what matters less.", _BRIDGE),
        ("Summarize the figures. Use the sentences of the text where you can.", _COMPANY),
        ("Write this recipe as a numbered list of steps. Keep the wording.", _BREAD),
        ("Write these instructions as a numbered list. Keep the wording.", _PUMP),
        ("List the decisions of these minutes in their own words.", _MEETING),
        ("What changes for readers, and when? Use the words of the notice.", _LIBRARY),
        ("What is known of this bird? Answer in sentences of the text.", _HERON),
        ("Say what a tenant has to pay, and when, as the lease says it.", _LEASE),
    )
)

_RAG = tuple(
    "Answer the question from the passages. Quote the sentences that you rely on in full, with the "
    f"number of their passage.\n\n[1] {first}\n\n[2] {second}\n\nQuestion: {question}"
    for first, second, question in (
        (_LIBRARY, _LEASE, "Where can reserved books be collected, and until when are loans kept?"),
        (_BRIDGE, _PUMP, "Which part of the bridge must be replaced, and why?"),
        (_BREAD, _HERON, "How long is the bread baked, with the lid and without it?"),
        (_PUMP, _BRIDGE, "What has to be done before the housing of the pump is opened?"),
        (_COMPANY, _MEETING, "Why did the operating margin fall?"),
        (_HERON, _LIBRARY, "When and how do grey herons hunt?"),
        (_MEETING, _COMPANY, "Until when do invoices stay on the old program, and why?"),
        (_LEASE, _BREAD, "Who pays for a repair of 90 euros, and is there a limit?"),
    )
)

_CLASS = '''\
class Basket:
    """What a customer wants to buy."""

    def __init__(self, customer):
        self.customer = customer
        self.lines = []

    def add(self, product, quantity):
        for line in self.lines:
            if line.product == product:
                line.quantity += quantity
                return
        self.lines.append(Line(product, quantity))

    def remove(self, product):
        self.lines = [line for line in self.lines if line.product != product]

    def total(self):
        return sum(line.product.price * line.quantity for line in self.lines)
'''

_PARSER = """\
def read_settings(path):
    settings = {}
    with open(path) as file:
        for number, line in enumerate(file, start=1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            if "=" not in line:
                raise ValueError(f"{path}:{number}: no '=' in {line!r}")
            name, value = line.split("=", 1)
            settings[name.strip()] = value.strip()
    return settings
"""

_JS = """\
function renderTable(rows, container) {
  const table = document.createElement("table");
  for (const row of rows) {
    const tr = document.createElement("tr");
    for (const cell of row) {
      const td = document.createElement("td");
      td.textContent = cell;
      tr.appendChild(td);
    }
    table.appendChild(tr);
  }
  container.replaceChildren(table);
}
"""

_C = """\
int find_last(const int *values, int count, int wanted) {
    int found = -1;
    for (int i = 0; i < count; i++) {
        if (values[i] == wanted) {
            found = i;
        }
    }
    return found;
}

int count_equal(const int *values, int count, int wanted) {
    int total = 0;
    for (int i = 0; i < count; i++) {
        if (values[i] == wanted) {
            total++;
        }
    }
    return total;
}
"""

_SQL = """\
SELECT customers.name, customers.city, SUM(orders.amount) AS revenue
FROM customers
JOIN orders ON orders.customer_id = customers.id
WHERE orders.created_at >= '2024-01-01' AND orders.created_at < '2025-01-01'
GROUP BY customers.name, customers.city
HAVING SUM(orders.amount) > 1000
ORDER BY revenue DESC
LIMIT 20;
"""

_EDIT = tuple(
    f"{task} Answer with the whole code and nothing else.\n\n```\n{code}```"
    for task, code in (
        (
            "Rename the method `total` to `total_price` and the attribute `lines` to `items`.",
            _CLASS,
        ),
        ("Add type hints to every method of this class.", _CLASS),
        ("Make a line without '=' a warning that is printed, not an error.", _PARSER),
        ("Add a docstring that says what this function returns and raises.", _PARSER),
        ("Make the cells of the first row th elements.", _JS),
        ("Change the type of the values from int to long in both functions.", _C),
        ("Have the first function stop at the first match, and rename it find_first.", _C),
        ("Take the year 2025 instead of 2024, and sort by city, then by revenue.", _SQL),
    )
)

_PEOPLE = """\
[
  {"id": 101, "name": "Maria Lopez", "city": "Valencia", "role": "engineer", "active": true},
  {"id": 102, "name": "Jonas Berg", "city": "Uppsala", "role": "designer", "active": false},
  {"id": 103, "name": "Aiko Tanaka", "city": "Kobe", "role": "engineer", "active": true},
  {"id": 104, "name": "Samuel Osei", "city": "Accra", "role": "analyst", "active": true}
]"""

_STOCK = """\
sku,title,price,stock
A-1001,Desk lamp,34.90,12
A-1002,Office chair,189.00,3
A-1003,Filing cabinet,129.50,0
B-2001,Whiteboard,79.00,7
B-2002,Marker set,8.40,140"""

_CONFIG = """\
{
  "server": {"host": "0.0.0.0", "port": 8080, "timeout_seconds": 30},
  "database": {"host": "db.internal", "port": 5432, "name": "orders", "pool_size": 10},
  "logging": {"level": "info", "file": "/var/log/orders.log", "max_files": 7},
  "features": {"invoices": true, "refunds": false, "export": true}
}"""

_JSON = tuple(
    f"{task} Answer with JSON and nothing else.\n\n{data}"
    for task, data in (
        ('Rename the key "city" to "location" in every object.', _PEOPLE),
        ('Add the key "country" to every object.', _PEOPLE),
        ("Set active to false for everybody, and keep all else as it is.", _PEOPLE),
        ("Turn this table into a list of objects with the column names as keys.", _STOCK),
        ('Turn this table into an object by sku, each with "title" and "stock".', _STOCK),
        ("Change the port of the server to 9090 and the logging level to debug.", _CONFIG),
        ("Switch every feature on, and double the pool size.", _CONFIG),
        ('Put each section into a list of objects with the keys "section" and "values".', _CONFIG),
    )
)

_CHAT = (
    "Why does bread rise, and why does it sometimes collapse in the oven?",
    "I have to give a talk next week and I am nervous. What can I do?",
    "Explain to a ten-year-old how a sailing boat can go against the wind.",
    "What should I think about before I adopt a dog?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What are the advantages and disadvantages of working from home?",
    "How do I find out why my old laptop has become slow?",
    "Suggest a plan for a weekend in a city by the sea, with bad weather.",
)

PROMPTS = {
    "copy": _COPY,
    "summary": _SUMMARY,
    "edit": _EDIT,
    "rag": _RAG,
    "json": _JSON,
    "chat": _CHAT,
}
