"""Mutants of what is kept of clients: documents, responses, files, batches."""

from mutant import Mutant

DOCUMENTS, RESPONSES = "serving/stored/documents.py", "serving/stored/responses.py"
FILES, UPLOAD, RUN = (f"serving/stored/{name}.py" for name in ("files", "upload", "batch_run"))
TEST_DOCUMENTS = "tests/serving/stored/test_documents.py"
TEST_STORED = "tests/serving/http/test_stored.py"
TEST_BACKGROUND = "tests/serving/http/test_background.py"
TEST_BATCHES = "tests/serving/http/test_batches.py"

# fmt: off
ROWS = (
    Mutant(
        "all keys have one owner", "stored", DOCUMENTS,
        'CALLER.get().key or b""', 'b""',
        (TEST_STORED, TEST_BATCHES), "a key reads what is of another",
    ),
    Mutant(
        "the newest document goes first", "stored", DOCUMENTS,
        "ORDER BY used LIMIT 1", "ORDER BY used DESC LIMIT 1",
        (TEST_DOCUMENTS,), "the conversation that goes on is lost",
    ),
    Mutant(
        "any owner makes room", "stored", DOCUMENTS,
        "(owner, _), *_ = self.num_bytes.most_common(1)",
        "owner = min(self.num_bytes)",
        (TEST_DOCUMENTS,), "a key that stores much pushes out what is of others",
    ),
    Mutant(
        "a file that is damaged is used", "stored", DOCUMENTS,
        'if found != "ok":', "if False:",
        (TEST_DOCUMENTS,), "damage is found in the middle of a request",
    ),
    Mutant(
        "deleted text stays on the disk", "stored", DOCUMENTS,
        "PRAGMA wal_checkpoint(TRUNCATE)", "PRAGMA wal_checkpoint(PASSIVE)",
        (TEST_DOCUMENTS,), "what a client deletes can be read by whoever gets the disk",
    ),
    Mutant(
        "a chain begins with its end", "stored", RESPONSES,
        "for turn in reversed(turns)", "for turn in turns",
        (TEST_STORED,), "the model reads the conversation backwards",
    ),
    Mutant(
        "an id is given twice", "stored", RESPONSES,
        "if shelf.raw(owner, asked.name) is not None:", "if False:",
        (TEST_STORED,), "responses that follow the first go on with the second",
    ),
    Mutant(
        "a response is kept in spite of store false", "stored", RESPONSES,
        "if asked.stores:", "if True:",
        (TEST_STORED,), "texts are kept that a client wants forgotten",
    ),
    Mutant(
        "a chain of any size is recalled", "stored", RESPONSES,
        "num_bytes > self._most or", "",
        (TEST_STORED,), "small requests make prompts that no body could bring",
    ),
    Mutant(
        "a response that was cancelled runs on", "stored", "serving/stored/background.py",
        "        job.task.cancel()\n        await", "        await",
        (f"{TEST_BACKGROUND}::test_it_is_cancelled",), "nobody wants what it makes",
    ),
    Mutant(
        "responses in the background are lost in a restart", "stored", "serving/stored/setup.py",
        "if is_ready and not tasks:", "if False:",
        (TEST_BACKGROUND,), "clients ask for them for ever",
    ),
    Mutant(
        "a key has any number of responses in the background", "stored",
        "serving/stored/background.py", ">= MAX_OPEN", ">= 1000 * MAX_OPEN",
        (TEST_BACKGROUND,), "a client fills the queue of all",
    ),
    Mutant(
        "a key has files without end", "stored", FILES,
        "sum(sizes) + num_bytes > self._most or", "",
        (TEST_BATCHES,), "a client fills the disk",
    ),
    Mutant(
        "a file has no largest size", "stored", UPLOAD,
        "if self.num_bytes > self._most:", "if False:",
        (TEST_BATCHES,), "a client fills the disk in one request",
    ),
    Mutant(
        "a name of a file is a path", "stored", UPLOAD,
        're.split(r"[/\\\\]", name)[-1]', "name",
        (TEST_BATCHES,), "a client that saves what it lists writes elsewhere",
    ),
    Mutant(
        "outputs can be seen before their end", "stored", FILES,
        'shown = (each for _, each in documents if not each["is_open"])',
        "shown = (each for _, each in documents)",
        (TEST_BATCHES,), "half an output is taken for all of it",
    ),
    Mutant(
        "a record that is cut stays", "stored", "serving/stored/appended.py",
        "os.truncate(path, end)", "pass",
        (TEST_BATCHES,), "the record after a kill cannot be read",
    ),
    Mutant(
        "lines are asked again after a restart", "stored", RUN,
        "if line.number not in done]", "]",
        (TEST_BATCHES,), "answers come twice, and are paid twice",
    ),
    Mutant(
        "lines go while clients wait", "stored", "serving/http/batches.py",
        "lambda: engine.stats.num_waiting > 0", "lambda: False",
        (f"{TEST_BATCHES}::test_no_line_begins_while_a_client_waits",), "a batch delays clients",
    ),
    Mutant(
        "lines are as urgent as clients", "stored", "serving/http/batches.py",
        'added | values | {"priority": added["priority"]}', "added | values",
        (TEST_BATCHES,), "lines with a priority of their own run before clients",
    ),
    Mutant(
        "a full queue is an answer", "stored", RUN,
        "if error.kind_name not in PATIENT:", "if True:",
        (f"{TEST_BATCHES}::test_a_queue_that_is_full_is_waited_for",), "lines fail at busy times",
    ),
)
# fmt: on
