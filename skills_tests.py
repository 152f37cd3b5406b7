# ── 8. Skills ──


def skill_md(description: str = "What it does.", name: str = "disk-full", more: str = "", body: str = "Steps.") -> str:
    return f"---\nname: {name}\ndescription: {description}\n{more}---\n{body}\n"


def parsed_skill(text: str, folder: str = "/s/disk-full"):
    return agentloop.parse_skill(text, folder, ("scripts/b.sh", "references/a.md"))


LOADED = {
    "plain": (skill_md(), "What it does."),
    "byte-order-mark": ("\ufeff" + skill_md(), "What it does."),
    "crlf": (skill_md().replace("\n", "\r\n"), "What it does."),
    "blanks-after-the-lines": (skill_md().replace("---\n", "--- \t\n"), "What it does."),
    "quoted": (skill_md('"Use: it"'), "Use: it"),
    "folded": (skill_md(">-\n  one\n  two"), "one two"),
    "literal-on-one-line": (skill_md("|\n  one\n\n  two"), "one two"),
    "everything-is-text": (skill_md("12"), "12"),
    "all-keys": (skill_md(more="license: MIT\ncompatibility: Debian\nallowed-tools: a b\nmetadata:\n  author: me\n"), "What it does."),
    "list-of-tools": (skill_md(more="allowed-tools:\n- run_shell\n"), "What it does."),
    "three-dashes-in-the-text": (skill_md("a---b", body="Steps.\n---\nMore."), "a---b"),
    "control-characters-gone": (skill_md('"a\\e[31mb\\0\\ud800"'), "ab?"),
    "longest": (skill_md("x" * 1024), "x" * 1024),
}


@pytest.mark.parametrize("text,description", LOADED.values(), ids=LOADED)
def test_a_skill_loads_without_findings(text, description):
    skill, findings = parsed_skill(text)
    assert findings == () and (skill.name, skill.description, skill.folder) == ("disk-full", description, "/s/disk-full")
    assert skill.body.startswith("Steps.") and "\r" not in skill.body
    assert skill.resources == ("references/a.md", "scripts/b.sh")
    assert skill.sha256 == hashlib.sha256(text.encode()).hexdigest()


BARE_COLONS = {
    "inside": ("Use when: a disk is full", "Use when: a disk is full"),
    "at-the-end": ("Use when:", "Use when:"),
    "quotes-in-it": ("It's \"new\": yes", "It's \"new\": yes"),
    "two-lines": ("one\n  two: three\n  four", "one two: three four"),
}


@pytest.mark.parametrize("written,description", BARE_COLONS.values(), ids=BARE_COLONS)
def test_an_unquoted_colon_in_a_description_is_tolerated_and_said(written, description):
    skill, findings = parsed_skill(skill_md(written))
    assert skill.description == description
    assert findings == (agentloop.Finding("/s/disk-full/SKILL.md:3", "tolerated: an unquoted colon in 'description'; put quotes around the text"),)


UNUSABLE = {
    "empty": ("", 1, "its first line must be ---"),
    "no-front-matter": ("# Steps\n", 1, "its first line must be ---"),
    "not-closed": ("---\nname: disk-full\n", 1, "no second line --- closes"),
    "nothing-in-it": ("---\n---\nSteps.\n", 2, "must be one map"),
    "a-list": ("---\n- a\n---\n", 2, "must be one map"),
    "two-documents": ("---\nname: disk-full\n...\n--- x\n---\n", 2, "must be one map"),
    "no-description": ("---\nname: disk-full\n---\n", 1, "the key 'description' is missing"),
    "no-name": ("---\ndescription: x\n---\n", 1, "the key 'name' is missing"),
    "description-empty": (skill_md(""), 3, "'description' is empty"),
    "description-of-nothing-visible": (skill_md('"\\0 "'), 3, "'description' is empty"),
    "description-too-long": (skill_md("x" * 1025), 3, "longer than 1,024"),
    "description-a-list": (skill_md("\n- x"), 3, "must be a text"),
    "compatibility-too-long": (skill_md(more=f"compatibility: {'x' * 501}\n"), 4, "longer than 500"),
    "unknown-key": (skill_md(more="license: MIT\nversion: 1\n"), 5, "unknown key 'version'; known here: name,"),
    "name-of-another-folder": (skill_md(name="disk"), 2, "must be that of the folder, 'disk-full'"),
    "name-too-long": (skill_md(name="a" * 65), 2, "longer than 64"),
    "name-empty": (skill_md(name="''"), 2, "must be lower-case"),
    "capital": (skill_md(name="Disk-full"), 2, "must be lower-case"),
    "underscore": (skill_md(name="disk_full"), 2, "must be lower-case"),
    "two-hyphens": (skill_md(name="disk--full"), 2, "must be lower-case"),
    "leading-hyphen": (skill_md(name="-disk-full"), 2, "must be lower-case"),
    "trailing-hyphen": (skill_md(name="disk-full-"), 2, "must be lower-case"),
    "a-path": (skill_md(name="../disk-full"), 2, "must be lower-case"),
    "key-twice": (skill_md(more="name: disk-full\n"), 4, "there twice"),
    "key-twice-below": (skill_md(more="metadata:\n  a: b\n  a: c\n"), 6, "there twice"),
    "key-of-no-text": (skill_md(more="? - a\n: b\n"), 4, "no text"),
    "tag": (skill_md("!!python/object/apply:os.system [id]"), 3, "a tag"),
    "anchor": (skill_md("&a x"), 3, "an anchor"),
    "alias": (skill_md(more="license: *a\n"), 4, "an alias"),
    "flow-list": (skill_md(more="allowed-tools: [a, b]\n"), 4, "a [list]"),
    "flow-map": (skill_md(more="metadata: {}\n"), 4, "a {map}"),
    "colon-elsewhere": (skill_md(more="license: a: b\n"), 4, "mapping values are not allowed here"),
    "both-colons": (skill_md("a: b", more="license: a: b\n"), 3, "mapping values are not allowed here"),
    "tab": (skill_md("\tx"), 3, "cannot start any token"),
    "control-character": (skill_md("a\x01b"), 3, "special characters are not allowed"),
    "half-surrogate": (skill_md("a\ud800b"), 3, "special characters are not allowed"),
    "no-such-character": (skill_md('"\\UFFFFFFFF"'), 2, "cannot be read"),
    "version-of-5000-digits": (f"---\n%YAML {'9' * 5000}.1\n--- x\n---\n", 2, "cannot be read"),
    "deep": (skill_md(more="metadata:\n" + "".join(" " * n + "a:\n" for n in range(1, 99))), 12, "too deep"),
    "deep-list": (skill_md(more="metadata:\n" + "- " * 3000 + "a\n"), 5, "too deep"),
    "long-front-matter": (skill_md(more="license: " + "x" * 8000 + "\n"), 1, "longer than 8,000"),
}


@pytest.mark.parametrize("text,line,problem", UNUSABLE.values(), ids=UNUSABLE)
def test_what_is_no_skill_is_a_finding_with_file_and_line(text, line, problem):
    skill, findings = parsed_skill(text)
    assert skill is None and findings[0].where == f"/s/disk-full/SKILL.md:{line}" and problem in findings[0].text


HOSTILE = {
    "flow-maps": "{" * 7_900, "flow-lists": "a: " + "[" * 7_900, "keys": "".join(f"k{n}: v\n" for n in range(900)),
    "blocks": "".join(" " * n + "a:\n" for n in range(120)), "colons": "description: " + ": " * 3_900,
    "aliases": "a: &a x\n" + "".join(f"b{n}: [*a,*a,*a,*a]\n" for n in range(400)), "quotes": "a: '" + "''" * 3_900,
    "megabytes": "a: b\n" * 400_000, "brackets": "[" * (2 << 20), "lines": "\n" * (2 << 20), "dashes": "--- x\n" * 300_000,
}


@pytest.mark.parametrize("inner", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_front_matter_neither_hangs_nor_raises(inner):
    began = time.process_time()
    skill, findings = parsed_skill(f"---\n{inner}\n---\nSteps.\n")
    assert skill is None and 1 <= len(findings) <= 11 and time.process_time() - began < 3
    assert all(len(finding.text) < 250 for finding in findings)


@given(st.text() | st.text("-: \n'\"[]{}&*!|>?#%@`anmedscriptoz\t\x85\u2028", max_size=60).map(lambda text: f"---\nname: disk-full\n{text}\n---\n"))
def test_any_text_is_a_skill_or_has_a_finding(text):
    skill, findings = parsed_skill(text)
    assert skill or findings
    assert all(re.fullmatch(r"/s/disk-full/SKILL\.md:[1-9]\d*", finding.where) and finding.text for finding in findings)
    if skill:
        (skill.description + skill.body).encode()
        assert skill.description and "\n" not in skill.description


FRONT_LINES = st.sampled_from([
    "name: a-b", "name: A-b", "name: é1", "name: a_b", "name: ' a-b '", "name: ａ-ｂ", "name: 'ǆ'", "name: a--b", "name: ''",
    "description: x", "description: 'a: b'", "description: a: b", "description: |\n  a\n  b", "description: null",
    "description: [x]", "description:", f"description: {'x' * 1025}", "description: a #b", "description: http://x/y",
    "description: \"a\\nb\"", "description: x\n  y", "license: MIT", "license:\n- a", "license: ~", "compatibility: x",
    f"compatibility: '{'x' * 501}'", "compatibility:\n  a: b", "metadata:\n  a: b\n  c: 1.0", "metadata: x", "metadata: {a: b}",
    "allowed-tools: a b", "allowed-tools: [a]", "allowed-tools:\n  - a", "version: 1", "# a comment", "", "<<: x", "? license\n: y",
    "'name': a-b", "on: true", "  name: a-b", "...", "license: &a x", "license: *a", "license: !!str x", "%YAML 1.1", "- x"])


@given(st.lists(FRONT_LINES, max_size=5).map("\n".join) | st.tuples(st.just("name: a-b\ndescription:"), st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=12)).map(" ".join), st.sampled_from(("a-b", "é1", "A-b", "ａ-ｂ", "ǆ")))
@settings(max_examples=400)
def test_the_reference_validator_judges_a_skill_alike(front, name):
    parser, validator = pytest.importorskip("skills_ref.parser"), pytest.importorskip("skills_ref.validator")
    text = f"---\n{front}\n---\nSteps.\n"
    try:
        metadata, body = parser.parse_frontmatter(text)
        problems = validator.validate_metadata(metadata, Path(f"/s/{name}"))
    except parser.ParseError as error:
        problems = [str(error)]
    except (AttributeError, AssertionError, OverflowError):
        return  # it breaks on the text itself
    skill, findings = agentloop.parse_skill(text, f"/s/{name}", ())
    if problems:
        assert findings and all(re.fullmatch(f"/s/{name}/SKILL[.]md:[0-9]+", finding.where) for finding in findings)
    else:
        assert skill and findings == () and skill.body == body
        assert skill.name == unicodedata.normalize("NFKC", metadata["name"].strip())
        assert skill.description == " ".join(metadata["description"].split())


def index_of(*descriptions: str) -> agentloop.SkillIndex:
    names = [f"skill-{n}" for n in range(len(descriptions))]
    return agentloop.index_skills(agentloop.parse_skill(skill_md(text, name), f"/s/{name}", ()) for name, text in zip(names, descriptions))


def test_the_first_skill_of_a_name_wins_and_the_other_is_a_finding():
    first, second = (agentloop.parse_skill(skill_md(), f"/{place}/disk-full", ()) for place in ("a", "b"))
    bad = agentloop.parse_skill("", "/a/bad", ())
    index = agentloop.index_skills([bad, first, second, first])
    assert index.skills == {"disk-full": first[0]}
    assert index.findings == (*bad[1], agentloop.Finding("/b/disk-full/SKILL.md", "not used: /a/disk-full has a skill of the same name"))


def test_the_catalog_has_a_line_for_each_skill():
    assert agentloop.catalog(index_of("One.", "Two."), 1000).split("\n")[1:] == ["- skill-0: One.", "- skill-1: Two."]
    assert agentloop.catalog(index_of(), 1000) == ""


def test_the_catalog_names_what_does_not_fit():
    text = agentloop.catalog(index_of(*["x" * 100] * 15), 800)
    assert text.count("\n- ") == 4 and text.endswith("\n… and 11 more: " + ", ".join(f"skill-{n}" for n in range(4, 15)))
    assert agentloop.catalog(index_of(*["x" * 100] * 1000), 200).endswith("\n… and 1000 more: skill-0, skill-1, skill-2, skill-3, skill-4, skill-5, skill-6, skill-7, skill-8, …")


@given(st.lists(st.integers(1, 300), max_size=20), st.integers(0, 3000))
@settings(max_examples=60)
def test_the_catalog_never_exceeds_its_budget_and_counts_every_skill(lengths, budget):
    text = agentloop.catalog(index_of(*("x" * length for length in lengths)), budget)
    more = re.search(r"\n… and (\d+) more", text)
    assert len(text) <= budget
    if budget >= 200:
        assert text.count("\n- ") + (int(more[1]) if more else 0) == len(lengths)


def test_an_activated_skill_says_its_steps_its_folder_and_its_files():
    skill, _ = parsed_skill(skill_md())
    assert agentloop.skill_text(skill) == ("Steps.\n\nFolder of this skill: /s/disk-full\nIts files, for read_file:"
                                           "\n- /s/disk-full/references/a.md\n- /s/disk-full/scripts/b.sh")


def write_skill(folder: Path, text: str | bytes = "") -> Path:
    """A skill of the folder's name, with that text if one is given."""
    folder.mkdir(parents=True)
    data = text or skill_md(name=folder.name)
    (folder / "SKILL.md").write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder


def found_skills(*folders: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """The names of the skills that are found, and the findings with their paths below the first folder."""
    index = agentloop.index_skills(agentloop.find_skills([str(folder) for folder in folders]))
    return list(index.skills), [(os.path.relpath(finding.where, folders[0]), finding.text) for finding in index.findings]


def test_the_skills_of_a_folder_are_found_by_name_with_their_files(tmp_path):
    for name in ("b", "a"):
        write_skill(tmp_path / name)
    (tmp_path / "no-skill").mkdir()
    (tmp_path / "SKILL.md").write_text(skill_md())
    for name in ("scripts/run.sh", "references/deep/er.md", "assets/x", "other/y", "README.md"):
        (tmp_path / "a" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / name).write_text("")
    found = list(agentloop.find_skills([str(tmp_path / "missing"), str(tmp_path)]))
    assert [(skill.name, skill.folder, findings) for skill, findings in found] == [
        ("a", f"{tmp_path}/a", ()), ("b", f"{tmp_path}/b", ())]
    assert found[0][0].resources == ("assets/x", "references/deep/er.md", "scripts/run.sh")


def test_no_link_is_followed_and_each_is_a_finding(tmp_path):
    outside, place = write_skill(tmp_path / "outside" / "linked"), tmp_path / "skills"
    write_skill(place / "good")
    (place / "linked").symlink_to(outside)
    (place / "notes").symlink_to(tmp_path)
    (place / "leak").mkdir()
    (place / "leak" / "SKILL.md").symlink_to(outside / "SKILL.md")
    (place / "good" / "scripts").symlink_to(outside)
    (place / "good" / "assets").mkdir()
    (place / "good" / "assets" / "key").symlink_to(outside / "SKILL.md")
    (place / "good" / "assets" / "loop").symlink_to(place / "good")
    link = "a link is not followed"
    assert found_skills(place) == (["good"], [
        ("good/scripts", f"not listed: {link}"), ("good/assets/key", f"not listed: {link}"), ("good/assets/loop", f"not listed: {link}"),
        ("leak/SKILL.md", f"not used: {link}"), ("linked", f"not used: {link}")])
    assert [skill.resources for skill, _ in agentloop.find_skills([str(place)]) if skill] == [()]


def test_a_place_that_is_itself_a_link_is_resolved(tmp_path):
    write_skill(tmp_path / "real" / "a")
    (tmp_path / "link").symlink_to("real")
    assert [skill.folder for skill, _ in agentloop.find_skills([str(tmp_path / "link")])] == [f"{tmp_path}/real/a"]


BAD_FILES = {
    "2-MiB": (skill_md(name="a").encode() + b"x" * (2 << 20), "a/SKILL.md", "not used: larger than 256 KiB"),
    "not-utf-8": (skill_md(name="a").encode() + b"\xff", "a/SKILL.md:6", "not UTF-8 text"),
    "wrong": (b"x", "a/SKILL.md:1", "its first line must be ---, with name and description below it"),
}


@pytest.mark.parametrize("data,where,text", BAD_FILES.values(), ids=BAD_FILES)
def test_one_bad_file_is_a_finding_and_the_others_load(tmp_path, data, where, text):
    write_skill(tmp_path / "a", data)
    write_skill(tmp_path / "b")
    assert found_skills(tmp_path) == (["b"], [(where, text)])


def test_a_skill_file_that_is_no_file_is_a_finding(tmp_path):
    (tmp_path / "a" / "SKILL.md").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    os.mkfifo(tmp_path / "b" / "SKILL.md")
    assert found_skills(tmp_path) == ([], [("a/SKILL.md", "not a file"), ("b/SKILL.md", "not a file")])


@pytest.mark.parametrize("path,where", [("", "."), ("a", "a"), ("a/SKILL.md", "a/SKILL.md")], ids=["place", "folder", "file"])
def test_what_others_may_write_is_not_used(tmp_path, path, where):
    write_skill(tmp_path / "a")
    os.chmod(tmp_path / path, 0o757)
    names, [finding] = found_skills(tmp_path)
    assert names == [] and finding == (where, "not used: others may write it")


def test_at_most_a_thousand_folders_are_looked_at(tmp_path):
    for n in range(2000):
        (tmp_path / f"{n:04}").mkdir()
    for name in ("0007", "0999", "1000"):
        (tmp_path / name / "SKILL.md").write_text(skill_md(name=f"'{name}'"))
    assert found_skills(tmp_path) == (["0007", "0999"], [(".", "only the first 1,000 of 2,000 folders were looked at")])


def test_the_list_of_a_skills_files_is_bounded(tmp_path):
    (write_skill(tmp_path / "a") / "scripts").mkdir()
    for n in range(300):
        (tmp_path / "a" / "scripts" / f"{n}").write_text("")
    [(skill, [finding])] = agentloop.find_skills([str(tmp_path)])
    assert 150 <= len(skill.resources) <= 200 and finding.text == "not all files are listed: more than 200 files and folders"


def test_a_place_that_is_a_file_is_a_finding(tmp_path):
    (tmp_path / "file").write_text("")
    assert found_skills(tmp_path / "file") == ([], [(".", "Not a directory")])


def test_the_shipped_skills_load_without_findings_and_call_only_what_exists():
    index = agentloop.index_skills(agentloop.find_skills([str(HERE / "skills")]))
    assert list(index.skills) == ["disk-full", "service-down"] and index.findings == ()
    manifest = agentloop.parse_manifest((HERE / "tools.toml").read_text(), "tools.toml")
    registry = agentloop.build_registry(manifest, lambda program: "/bin/true")
    shipped = (HERE / "pyproject.toml").read_text()
    for skill in index.skills.values():
        calls = re.findall(r"`([a-z_]+) (\{.*?\})`", skill.body)
        assert len(calls) >= 8 and len(calls) * 2 == skill.body.count("`") and len(skill.body.split("\n")) < 60
        for name, arguments in calls:
            assert agentloop.argument_problem(registry.tools[name].schema, json.loads(arguments)) is None, (name, arguments)
        assert f'"share/agentloop/skills/{skill.name}" = ["skills/{skill.name}/SKILL.md"]' in shipped
