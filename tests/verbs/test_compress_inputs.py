"""Which files of a compression are compared with those of the run that continues."""

from own_files import encoder

from kdcli.data import sources
from kdcli.engine.processes import StopRequest
from kdcli.recipe.resolve import resolve
from kdcli.verbs.compress import inputs
from kdcli.verbs.compress.journal import Journal
from kdcli.verbs.compress.settings import CompressRecipe


def test_all_parts_of_the_data_and_the_recipes_of_steps_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "HASHES", hashes := {})
    folder, more = tmp_path / "beir", tmp_path / "more.jsonl"
    hashes |= {str(folder / "corpus.jsonl"): "1", str(more): "2", str(tmp_path / "other.csv"): "3"}
    plan = tmp_path / "plan.yaml"
    plan.write_text("method: tinybert\n")
    options = {"model": str(encoder(tmp_path / "m")), "task": "retrieval"}
    options |= {"data.source": str(folder), "data.train": str(more)}
    options |= {"plan.distill.recipe": str(plan)}
    recipe = resolve(CompressRecipe, options=options, recipe=None).recipe
    found = inputs.hashes_of_inputs(recipe)
    assert found.keys() == {str(folder / "corpus.jsonl"), str(more), str(plan), recipe.model}
    plan.write_text("method: minilm\n")
    assert inputs.hashes_of_inputs(recipe)[str(plan)] != found[str(plan)]


def test_data_at_a_url_and_the_text_of_a_trimming_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "version_of_model", lambda _: None)
    data, text = tmp_path / "rows.jsonl", tmp_path / "words.txt"
    data.write_text('{"text": "w1", "label": "calm"}\n')
    text.write_text("w1\n")
    recipe = CompressRecipe(
        model="m",
        task="own",
        data={"source": data.as_uri()},
        steps=[{"trim": {"data": {"source": str(text)}}}, {"export": {}}],
    )
    journal = Journal(None, StopRequest())
    sources.HASHES.clear()
    assert inputs.changed_inputs(recipe, journal) == []
    data.write_text('{"text": "w2", "label": "brisk"}\n')
    assert inputs.changed_inputs(recipe, journal) == [data.as_uri()]
    sources.HASHES.clear()
    text.write_text("w2\n")
    assert inputs.changed_inputs(recipe, journal) == [data.as_uri(), str(text)]


def test_a_text_that_a_list_of_languages_names_is_hashed(tmp_path):
    text, languages = tmp_path / "de.txt", tmp_path / "languages.yaml"
    text.write_text("Ein Satz.\n")
    languages.write_text(f"de: {text}\n")
    recipe = CompressRecipe(
        model="m",
        steps=[{"trim": {"data": {"source": str(languages)}}}, {"export": {}}],
    )
    found = inputs.hashes_of_inputs(recipe)
    assert {str(text), str(languages)} <= found.keys()
