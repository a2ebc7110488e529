//! Plain technical English in comments, messages and documents.

use regex::Regex;
use spurline_tidy::prose::{ProseRun, of_markdown, of_rust, sentence_lengths};
use spurline_tidy::{root, texts};

/// Words and idioms that are not used, and what to write instead.
const BANNED: &[(&str, &str)] = &[
    (r"\bnobody\b|\bsomebody\b|\banybody\b", "name the process, thread, user or program"),
    (
        r"\bwho (ask|asked|answer|wait|ha[sd]|hold|is|was|read|does|want|come|give|take|find|look|else)s?\b|\bwhom\b",
        "name the process, thread, user or program",
    ),
    (r"\b(is|are|was|were|be|been) told\b|\btold of\b|\btells (it|them|us)\b", "is notified, gets, receives; reports"),
    (r"\bgone round\b|\bgoes round\b|\bgo round\b", "is avoided, is skipped"),
    (r"\bat hand\b", "available, in memory, polled"),
    (r"\blets? go of\b|\bis let go\b", "is released"),
    (r"\bstands? still\b|\bstood still\b", "stalls"),
    (r"\bbroken? off\b|\bbreaks? off\b", "is aborted"),
    (r"\bsigns? of life\b", "heartbeat"),
    (r"\bunder-stores?\b|\bunderstores?\b", "origin"),
    (r"\bas good as\b", "say what is equal"),
    (r"\bin vain\b", "say what failed"),
    (r"\bthe words were wrong\b", "usage error"),
    (r"\bgoes by\b|\bgo by the\b", "follows, uses"),
    (r"\bgreets?\b|\bgreeted\b|\bgreetings?\b", "handshake"),
    (r"\basks? (nobody|for a proof)\b|\bis asked aside\b", "requires, queries"),
    (r"\bis looked after\b|\blooks after\b", "manages, monitors"),
    (r"\bgives? itself up\b|\bis given up\b|\bare given up\b", "is abandoned"),
];

fn findings(shown: &str, runs: Vec<ProseRun>, banned: &[(Regex, &str)]) -> Vec<String> {
    let mut found = Vec::new();
    for run in runs {
        // A string without a space is a name or a key, not prose.
        if !run.text.trim().contains(' ') {
            continue;
        }
        for (pattern, instead) in banned {
            if let Some(hit) = pattern.find(&run.text) {
                found.push(format!("{shown}:{}: '{}'; write: {instead}", run.line, hit.as_str()));
            }
        }
    }
    found
}

#[test]
fn words_are_plain_technical_english() {
    let banned: Vec<(Regex, &str)> = BANNED
        .iter()
        .map(|(pattern, instead)| (Regex::new(&format!("(?i){pattern}")).expect("a valid pattern"), *instead))
        .collect();
    let mut broken = Vec::new();
    for (path, text) in texts(&[".rs", ".md"]) {
        let shown = path.strip_prefix(root()).unwrap_or(&path).display().to_string();
        // This file has to name the words.
        if shown == "tools/tidy/tests/tidy/prose.rs" {
            continue;
        }
        let runs = if shown.ends_with(".md") { of_markdown(&text) } else { of_rust(&text) };
        broken.extend(findings(&shown, runs, &banned));
    }
    assert!(broken.is_empty(), "{} idioms:\n  {}", broken.len(), broken.join("\n  "));
}

#[test]
fn sentences_of_the_main_documents_are_short() {
    for name in ["ARCHITECTURE.md", "SEMANTICS.md"] {
        let text = std::fs::read_to_string(root().join(name)).expect("the document is there");
        let lengths = sentence_lengths(&text);
        let average = lengths.iter().sum::<usize>() as f64 / lengths.len().max(1) as f64;
        println!("{name}: {} sentences, {average:.1} words on average", lengths.len());
        assert!(average < 20.0, "{name}: sentences have {average:.1} words on average, 20 are the limit");
    }
}
