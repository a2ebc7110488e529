//! The house rules. Each test names the files that break its rule and what to do.

use serde_json::Value;
use spurline_tidy::{files, metadata, root, slug, texts};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

fn none(broken: Vec<String>, remedy: &str) {
    assert!(broken.is_empty(), "{remedy}:\n  {}", broken.join("\n  "));
}

fn shown(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

/// The groups below `crates/`, lowest first. A crate may name crates of its own group and of groups listed before it.
const GROUPS: &[&str] = &["base", "net", "origin", "host", "cache", "cluster", "access", "service", "kube"];

/// Crates of a group in layers, lowest first. Crates that share a layer do not name each other.
const LAYERS: &[(&str, &[&[&str]])] = &[
    ("base", &[&["types", "exec", "sys"], &["mem"], &["volume"]]),
    ("net", &[&["proto"], &["trust", "verbs"], &["transport"], &["tcp", "rdma", "sim"]]),
    ("origin", &[&["store"], &["read"], &["directory", "objects"]]),
    ("host", &[&["fabric", "umad"], &["rails"], &["probe"]]),
    ("cache", &[&["store"], &["cache"]]),
    ("cluster", &[&["membership", "jobs", "stage"], &["rules"], &["client", "node"]]),
    ("access", &[&["fs", "keeper"], &["export", "fuse", "s3"]]),
    ("service", &[&["config", "observe"], &["runtime"]]),
    ("kube", &[&["devices", "csi", "manifests"], &["plugin"]]),
];

/// A crate's group and its layer within the group, by the directory that holds it.
fn place_in_layers(dir: &str) -> Option<(usize, usize)> {
    let mut parts = dir.strip_prefix("crates/")?.split('/');
    let (group, name) = (parts.next()?, parts.next()?);
    let height = GROUPS.iter().position(|g| *g == group)?;
    let (_, layers) = LAYERS.iter().find(|(g, _)| *g == group)?;
    Some((height, layers.iter().position(|l| l.contains(&name))?))
}

fn ours(metadata: &Value) -> Vec<&Value> {
    let packages = metadata["packages"].as_array().unwrap();
    packages.iter().filter(|p| p["source"].is_null()).collect()
}

#[test]
fn layers_point_down() {
    let metadata = metadata();
    let dirs: BTreeMap<&str, String> = ours(&metadata)
        .into_iter()
        .filter_map(|p| {
            let dir = Path::new(p["manifest_path"].as_str()?).parent()?;
            Some((p["name"].as_str()?, shown(dir)))
        })
        .collect();
    let mut broken = Vec::new();
    for package in ours(&metadata) {
        let name = package["name"].as_str().unwrap();
        let dir = &dirs[name];
        let own = place_in_layers(dir);
        if dir.starts_with("crates/") && own.is_none() {
            broken.push(format!("{dir} has no layer"));
        }
        for dependency in package["dependencies"].as_array().unwrap() {
            let Some(other) = dependency["name"].as_str().and_then(|n| dirs.get(n)) else { continue };
            // Tests may look up: a lower crate is tried with a higher one's parts.
            if dependency["kind"] == "dev" {
                continue;
            }
            let allowed = match own {
                // The product names no tool and not the binary.
                Some(own) => place_in_layers(other).is_some_and(|theirs| theirs < own),
                // The binary links no tool, and no tool the binary; both stand above all crates.
                None if dir.starts_with("bin/") => other.starts_with("crates/"),
                None => !other.starts_with("bin/"),
            };
            if !allowed {
                broken.push(format!("{dir} names {other}"));
            }
        }
    }
    none(broken, "layers point down only; see the map in ARCHITECTURE.md, and GROUPS and LAYERS in this test");
}

/// Other front ends use the runtime, and have a command line of their own or none. Settings are flags too, by a feature of
/// `spurline-config` that only the program requests.
#[test]
fn the_runtime_and_all_below_it_have_no_command_line() {
    let metadata = metadata();
    let mut broken = Vec::new();
    for package in ours(&metadata) {
        let name = package["name"].as_str().unwrap();
        let dir = Path::new(package["manifest_path"].as_str().unwrap()).parent().unwrap();
        for dependency in package["dependencies"].as_array().unwrap() {
            let clap = dependency["name"].as_str().is_some_and(|name| name.starts_with("clap"));
            let settings = name == "spurline-config" && dependency["optional"] == true;
            if clap && !settings && dependency["kind"] != "dev" && shown(dir).starts_with("crates/") {
                broken.push(format!("{name} names {}", dependency["name"]));
            }
        }
    }
    for front_end in ["spurline-runtime", "spurline-python"] {
        let tree = ["tree", "--locked", "--offline", "--edges", "normal", "--prefix", "none", "--package", front_end];
        let out = Command::new("cargo").current_dir(root()).args(tree).output().unwrap();
        let linked = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success() && linked.contains("spurline-config"), "{}", String::from_utf8_lossy(&out.stderr));
        if linked.lines().any(|line| line.starts_with("clap")) {
            broken.push(format!("{front_end} links clap"));
        }
    }
    none(broken, "arguments belong to the programs: take plain values, the settings of crates/service/config");
}

#[test]
fn only_the_runtime_the_programs_and_tests_name_a_concrete_transport() {
    let metadata = metadata();
    let allowed = ["spurline", "spurline-bench", "spurline-probe", "spurline-runtime"];
    let mut broken = Vec::new();
    for package in ours(&metadata) {
        let name = package["name"].as_str().unwrap();
        for dependency in package["dependencies"].as_array().unwrap() {
            let concrete = matches!(
                dependency["name"].as_str(),
                Some("spurline-net-tcp" | "spurline-net-rdma" | "spurline-net-sim")
            );
            if concrete && dependency["kind"] != "dev" && !allowed.contains(&name) {
                broken.push(format!("{name} names {}", dependency["name"]));
            }
        }
    }
    none(broken, "take a transport through the traits of spurline-transport");
}

#[test]
fn cargo_deny_accepts_the_dependencies() {
    let run =
        |check: &str| Command::new("cargo").current_dir(root()).args(["deny", "--offline", "check", check]).output();
    if !Command::new("cargo").args(["deny", "--version"]).output().is_ok_and(|o| o.status.success()) {
        skip(
            "cargo-deny",
            "cargo-deny is not installed (scripts/setup nightly does it): licences, sources and advisories are not checked",
        );
        return;
    }
    for check in ["licenses", "bans", "sources"] {
        let out = run(check).expect("cargo deny runs");
        assert!(out.status.success(), "cargo deny check {check}: {}", String::from_utf8_lossy(&out.stderr));
    }
    let out = Command::new("cargo")
        .current_dir(root())
        .args(["deny", "check", "advisories"])
        .output()
        .expect("cargo deny runs");
    let text = String::from_utf8_lossy(&out.stderr);
    if !out.status.success() && text.contains("failed to fetch advisory database") {
        skip("advisories", "the advisory database can't be reached");
        return;
    }
    assert!(out.status.success(), "cargo deny check advisories: {text}");
}

fn skip(thing: &str, why: &str) {
    let required = std::env::var("SPURLINE_TEST_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|r| r == thing), "SPURLINE_TEST_REQUIRE lists {thing}: {why}");
    println!("SKIP: {why}");
}

#[test]
fn modules_say_first_what_they_are() {
    let broken = texts(&[".rs"]).into_iter().filter(|(_, text)| !text.starts_with("//! ")).map(|(p, _)| shown(&p));
    none(broken.collect(), "the first line is `//! ` and what the module owns");
}

#[test]
fn files_stay_small() {
    let broken = texts(&[".rs"]).into_iter().filter_map(|(path, text)| {
        let lines = text.lines().count();
        (lines > 900).then(|| format!("{}: {lines} lines", shown(&path)))
    });
    none(broken.collect(), "past 900 lines; look for the seam");
}

#[test]
fn programs_of_make_test_end_within_two_minutes() {
    const LIMIT_SECONDS: u64 = 120;
    let root = root();
    let mut broken = Vec::new();
    for (list, limit) in [("tests/seconds", LIMIT_SECONDS), ("tests/seconds-all", u64::MAX)] {
        let text = std::fs::read_to_string(root.join(list)).unwrap();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let mut columns = line.split('\t');
            let seconds: u64 = columns.next().unwrap_or_default().parse().unwrap();
            let program = columns.next().unwrap_or_default();
            if ![".rs", "/main.rs"].iter().any(|ending| root.join(format!("{program}{ending}")).exists()) {
                broken.push(format!("{list}: {program} does not exist"));
            }
            if seconds > limit {
                broken.push(format!("{list}: {program} takes {seconds} s, more than {limit}"));
            }
        }
    }
    none(broken, "divide the program, or move its long tests into a module `test_all`");
}

/// What is wrong with a text below `--help`: a paragraph is one line, which the terminal's width divides, and a command to
/// copy is never divided.
fn faults_of_help_text(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let mut faults = Vec::new();
    for pair in lines.windows(2) {
        let prose = pair.iter().all(|line| !line.is_empty() && !line.starts_with(' '));
        let described = pair.iter().all(|line| {
            let inner = line.strip_prefix("  ").unwrap_or_default();
            !inner.is_empty() && !inner.starts_with(' ') && !inner.starts_with("spurline") && !inner.contains("  ")
        });
        if (prose && !pair[0].ends_with(':')) || described {
            faults.push(format!("a fixed line break behind '{}'", pair[0]));
        }
    }
    let copied = lines.iter().filter(|line| line.starts_with("    ") || line.starts_with("  spurline"));
    faults.extend(copied.filter(|line| line.chars().count() > 80).map(|line| format!("more than 80 columns: {line}")));
    faults
}

#[test]
fn help_texts_fit_every_terminal() {
    let literal =
        regex::Regex::new(r#"const \w*(?:EXAMPLES|NOTE|BENCHMARKS): &str =\s*"\\?\n?((?:[^"\\]|\\(?s:.))*)";"#);
    let literal = literal.expect("a valid pattern");
    let joined = regex::Regex::new(r"\\\n *").expect("a valid pattern");
    let mut broken = Vec::new();
    let mut texts_seen = 0;
    for (path, source) in texts(&[".rs"]) {
        let path = shown(&path);
        if !path.starts_with("bin/spurline/src") && !path.starts_with("tools/bench/src") {
            continue;
        }
        for text in literal.captures_iter(&source) {
            texts_seen += 1;
            // An escaped backslash at the end of a line is text, a plain one joins the lines.
            let text = text[1].replace("\\\\", "\0");
            let text = joined.replace_all(&text, "").replace('\0', "\\").replace("\\\"", "\"");
            broken.extend(faults_of_help_text(&text).into_iter().map(|fault| format!("{path}: {fault}")));
        }
    }
    assert!(texts_seen > 20, "{texts_seen}");
    none(broken, "end a line of prose with a backslash, and a command with two");
}

#[test]
fn nothing_is_left_for_later() {
    let words = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X:")];
    let mut broken = Vec::new();
    for (path, text) in
        texts(&[".rs", ".md", ".toml", ".sh", ".html", "Makefile", "scripts/setup", "scripts/test", "scripts/vm"])
    {
        for (number, line) in text.lines().enumerate() {
            if words.iter().any(|w| line.contains(w)) {
                broken.push(format!("{}:{}", shown(&path), number + 1));
            }
        }
    }
    none(broken, "do it, or say in the documents what is not there");
}

#[test]
fn no_path_of_somebodys_machine() {
    let own = root().display().to_string();
    let words = [concat!("/ho", "me/"), concat!("/Us", "ers/"), own.as_str()];
    let mut broken = Vec::new();
    for path in files() {
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        for (number, line) in text.lines().enumerate() {
            if let Some(word) = words.iter().find(|w| line.contains(**w)) {
                broken.push(format!("{}:{} has {word}", shown(&path), number + 1));
            }
        }
    }
    none(broken, "paths are relative or come from the environment");
}

/// Crates that hosts speak through with each other. Their clocks may disagree by hours, so that none of them may ask what
/// time of the day it is; when a certificate ends is the TLS library's matter.
const AGREED_ON: [&str; 9] = [
    "cluster/client",
    "cluster/jobs",
    "cluster/membership",
    "cluster/node",
    "net/proto",
    "net/rdma",
    "net/tcp",
    "net/transport",
    "net/trust",
];

#[test]
fn nothing_that_hosts_agree_on_has_a_time_of_day() {
    let words = ["SystemTime::now", "UNIX_EPOCH.elapsed", "UNIX_EPOCH).elapsed", "CLOCK_REALTIME", "Utc::now"];
    let mut broken = Vec::new();
    for (path, text) in texts(&[".rs"]) {
        let shown = shown(&path);
        if AGREED_ON.iter().any(|name| shown.starts_with(&format!("crates/{name}/src/"))) {
            broken.extend(words.iter().filter(|word| text.contains(**word)).map(|word| format!("{shown} has {word}")));
        }
    }
    none(broken, "use Instant, and let leases run by the receiver's own clock");
}

/// Crates that may hold unsafe code, and what for.
const UNSAFE: &[(&str, &str)] = &[
    ("crates/base/mem", "one arena cut into buffers"),
    ("crates/access/fuse", "the FUSE device, its io_uring queues and mount calls"),
    ("crates/cache/store", "io_uring and O_DIRECT buffers"),
    ("crates/host/probe", "TCP_INFO by getsockopt, which no library in use has"),
    ("crates/origin/read", "leases by fcntl, which no library in use has"),
    (
        "crates/origin/directory",
        "locks by fcntl, which no library in use has; a thread's own mask, a close that reports errors, rules of a mount",
    ),
    ("crates/host/umad", "calls into libibumad"),
    ("bin/python", "buffers of Python programs that reads fill, and one of its own"),
    ("tools/bench", "a mapping of a file, as loaders of models have"),
    ("tools/rig", "ioctls, quotas and locks by fcntl, for tests"),
    ("tools/vtime", "the C library's clocks, futexes and threads, defined anew for tests"),
    ("crates/net/verbs", "calls into libibverbs and librdmacm, memory that NICs reach"),
];

#[test]
fn unsafe_code_is_where_the_list_says() {
    let mut broken = Vec::new();
    for (path, text) in texts(&["src/lib.rs", "src/main.rs"]) {
        let name = shown(&path);
        let listed = UNSAFE.iter().any(|(dir, _)| name.starts_with(&format!("{dir}/")));
        if !listed && !text.contains("#![forbid(unsafe_code)]") {
            broken.push(name);
        }
    }
    none(broken, "forbid unsafe code, or add the crate and its reason to UNSAFE in this test and ARCHITECTURE.md");
}

/// `[text](target)` of a document, code blocks left out.
fn links(text: &str) -> Vec<String> {
    let mut out = Vec::new();
    let mut code = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            code = !code;
            continue;
        }
        if code {
            continue;
        }
        let mut rest = line;
        while let Some(start) = rest.find("](") {
            rest = &rest[start + 2..];
            if let Some(end) = rest.find(')') {
                out.push(rest[..end].to_owned());
            }
        }
    }
    out
}

fn anchors(text: &str) -> BTreeSet<String> {
    text.lines().filter(|l| l.starts_with('#')).map(|l| slug(l.trim_start_matches('#'))).collect()
}

#[test]
fn links_of_documents_lead_somewhere() {
    let mut broken = Vec::new();
    for (path, text) in texts(&[".md"]) {
        for link in links(&text) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
            if !target.exists() {
                broken.push(format!("{}: {link}", shown(&path)));
            } else if !anchor.is_empty() {
                let there = std::fs::read_to_string(&target).unwrap_or_default();
                if !anchors(&there).contains(anchor) {
                    broken.push(format!("{}: {link} (no such heading)", shown(&path)));
                }
            }
        }
    }
    none(broken, "links that lead nowhere");
}

/// Documents that a reader takes in at once, with their largest sizes in KiB. A longer one has parts for a page of their own.
const DOCUMENT_SIZES_KIB: [(&str, u64); 3] = [("ARCHITECTURE.md", 14), ("BENCHMARKS.md", 17), ("CHANGELOG.md", 8)];

#[test]
fn documents_stay_short() {
    let broken = DOCUMENT_SIZES_KIB.iter().filter_map(|(name, most)| {
        let bytes = std::fs::metadata(root().join(name)).expect("the document is there").len();
        (bytes > most << 10).then(|| format!("{name}: {bytes} bytes, {most} KiB are the limit"))
    });
    none(broken.collect(), "shorten it, or move a part to a page below docs/");
}

#[test]
fn the_documents_are_there() {
    let wanted = [
        "README.md",
        "ARCHITECTURE.md",
        "SEMANTICS.md",
        "CONFIGURATION.md",
        "TROUBLESHOOTING.md",
        "BENCHMARKS.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "LICENSE",
        "deny.toml",
        "Makefile",
        ".ci/run",
    ];
    none(wanted.iter().filter(|f| !root().join(f).is_file()).map(|f| (*f).to_owned()).collect(), "missing");
    let map = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let unmapped = ours(&metadata())
        .iter()
        .filter_map(|p| {
            let dir = Path::new(p["manifest_path"].as_str()?).parent()?;
            let dir = shown(dir);
            (!map.contains(&format!("`{dir}`"))).then_some(dir)
        })
        .collect();
    none(unmapped, "crates that the map in ARCHITECTURE.md does not name");
}
