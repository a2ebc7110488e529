//! The prose of the tree: comments and strings of Rust sources, and the text of Markdown documents, each with the line. Knows no
//! rule; the banned words are a test of this crate.

/// A run of prose and the line of the beginning.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProseRun {
    /// The line, from 1.
    pub line: usize,
    /// The text, without comment marks and quotes.
    pub text: String,
}

/// Comments and string literals of Rust source text.
pub fn of_rust(source: &str) -> Vec<ProseRun> {
    let chars: Vec<char> = source.chars().collect();
    let mut runs = Vec::new();
    let mut at = 0;
    let mut line = 1;
    while at < chars.len() {
        let rest = &chars[at..];
        let (length, text) = if rest.starts_with(&['/', '/']) {
            let length = rest.iter().position(|c| *c == '\n').unwrap_or(rest.len());
            let text: String = rest[..length].iter().collect();
            (length, Some(text.trim_start_matches(['/', '!']).trim().to_owned()))
        } else if rest[0] == '"' {
            let length = string_length(rest);
            (length, Some(rest[1..length.saturating_sub(1)].iter().collect()))
        } else if let Some(hashes) = raw_string(&chars, at) {
            let end: Vec<char> = std::iter::once('"').chain(std::iter::repeat_n('#', hashes)).collect();
            let open = hashes + 2;
            let body = rest[open..].windows(end.len()).position(|w| w == end).unwrap_or(rest.len() - open - end.len());
            (open + body + end.len(), Some(rest[open..open + body].iter().collect()))
        } else if rest[0] == '\'' {
            (character_length(rest), None)
        } else {
            (1, None)
        };
        if let Some(text) = text
            && !text.is_empty()
        {
            runs.push(ProseRun { line, text });
        }
        line += rest[..length].iter().filter(|c| **c == '\n').count();
        at += length;
    }
    runs
}

/// The length of the string literal that `rest` begins with, quotes included.
fn string_length(rest: &[char]) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            '\\' => at += 2,
            '"' => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// The number of hashes where a raw string begins, with or without a `b` before.
fn raw_string(chars: &[char], at: usize) -> Option<usize> {
    let part_of_a_name = at > 0 && (chars[at - 1].is_alphanumeric() || chars[at - 1] == '_') && chars[at - 1] != 'b';
    if chars[at] != 'r' || part_of_a_name {
        return None;
    }
    let hashes = chars[at + 1..].iter().take_while(|c| **c == '#').count();
    (chars.get(at + 1 + hashes) == Some(&'"')).then_some(hashes)
}

/// The length of a character literal, or 1 for the quote of a lifetime.
fn character_length(rest: &[char]) -> usize {
    match rest {
        [_, '\\', ..] => 3 + rest[3..].iter().position(|c| *c == '\'').unwrap_or(0),
        [_, _, '\'', ..] => 3,
        _ => 1,
    }
}

/// The text of a Markdown document, code blocks and code spans left out.
pub fn of_markdown(source: &str) -> Vec<ProseRun> {
    let mut runs = Vec::new();
    let mut in_code = false;
    for (index, line) in source.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        } else if !in_code {
            let text: String = line.split('`').step_by(2).collect::<Vec<_>>().join("``");
            if !text.trim().is_empty() {
                runs.push(ProseRun { line: index + 1, text });
            }
        }
    }
    runs
}

/// The lengths in words of the sentences of a Markdown document. Headings, tables and code blocks hold no sentences.
pub fn sentence_lengths(source: &str) -> Vec<usize> {
    let mut paragraphs = vec![String::new()];
    let mut in_code = false;
    for line in source.lines() {
        let trimmed = line.trim_start();
        if trimmed.starts_with("```") {
            in_code = !in_code;
            paragraphs.push(String::new());
        } else if in_code || trimmed.is_empty() || trimmed.starts_with(['#', '|', '<']) {
            paragraphs.push(String::new());
        } else {
            let item = trimmed.strip_prefix("- ").or_else(|| {
                trimmed.split_once(". ").and_then(|(n, rest)| n.chars().all(|c| c.is_ascii_digit()).then_some(rest))
            });
            if item.is_some() {
                paragraphs.push(String::new());
            }
            let last = paragraphs.last_mut().expect("there is always one");
            last.push_str(item.unwrap_or(trimmed));
            last.push(' ');
        }
    }
    let mut lengths = Vec::new();
    for paragraph in paragraphs {
        let mut words = 0;
        for word in paragraph.split_whitespace() {
            words += 1;
            let bare = word.trim_end_matches(['*', ')', '`', '"']);
            if bare.ends_with(['.', '?', '!', ':']) && !bare.ends_with("e.g.") && !bare.ends_with("i.e.") {
                lengths.push(words);
                words = 0;
            }
        }
        if words > 0 {
            lengths.push(words);
        }
    }
    lengths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_strings_are_prose_and_code_is_not() {
        let source = "/// First.\nlet c = '\"'; let s = \"a \\\" b\"; // last\nlet r = r#\"raw \"text\"#; fn f<'a>(x: &'a str) {}\n\"end\"";
        let runs: Vec<(usize, String)> = of_rust(source).into_iter().map(|r| (r.line, r.text)).collect();
        let expected = [(1, "First."), (2, "a \\\" b"), (2, "last"), (3, "raw \"text"), (4, "end")];
        assert_eq!(runs, expected.map(|(line, text)| (line, text.to_owned())));
    }

    #[test]
    fn code_in_markdown_is_not_prose() {
        let runs = of_markdown("A `flag` here.\n```\ncode\n```\nB");
        assert_eq!(runs.iter().map(|r| r.line).collect::<Vec<_>>(), [1, 5]);
        assert!(!runs[0].text.contains("flag"));
    }

    #[test]
    fn sentences_are_counted_by_paragraph() {
        assert_eq!(sentence_lengths("# Heading\n\nOne two three. Four\nfive.\n- Six seven\n\n| a | b |\n"), [3, 2, 2]);
    }
}
