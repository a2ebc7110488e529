//! Renders the chart's templates as Helm does: the used part of Helm's language (`if`, `range`, values, and the functions below).
//! Anything else is an error. Knows no value and no object.

use aws_lc_rs::digest::{SHA256, digest};
use serde_json::Value;
use std::fmt::Write as _;

type TemplateResult<T> = Result<T, String>;

/// What all templates of a chart get.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TemplateInput<'a> {
    /// `Values`, `Release` and the like.
    pub data: &'a Value,
    /// The templates that `include` finds, by path.
    pub templates: &'a [(&'a str, &'a str)],
}

/// The text that a template makes.
///
/// # Errors
/// The action that is wrong, and why.
pub(crate) fn render_template(template: &str, input: TemplateInput<'_>) -> TemplateResult<String> {
    let scope = TemplateScope { input, dot: input.data.clone(), variables: Vec::new() };
    let mut out = String::new();
    scope.render(&split(template)?, &mut out)?;
    Ok(out)
}

/// A piece of a template.
#[derive(Debug, Clone, Copy)]
enum Segment<'t> {
    Text(&'t str),
    /// What stands between `{{` and `}}`.
    Action(&'t str),
}

fn split(template: &str) -> TemplateResult<Vec<Segment<'_>>> {
    let mut segments = Vec::new();
    let mut rest = template;
    while let Some((text, action)) = rest.split_once("{{") {
        let end = action_end(action).ok_or_else(|| format!("'{{{{{action}' has no end"))?;
        rest = &action[end + 2..];
        let mut action = &action[..end];
        let mut text = text;
        if let Some(trimmed) = action.strip_prefix('-') {
            action = trimmed;
            text = text.trim_end();
        }
        if let Some(trimmed) = action.strip_suffix('-') {
            action = trimmed;
            rest = rest.trim_start();
        }
        segments.push(Segment::Text(text));
        segments.push(Segment::Action(action.trim()));
    }
    segments.push(Segment::Text(rest));
    Ok(segments)
}

/// Where an action ends: at the first `}}` outside a text.
fn action_end(action: &str) -> Option<usize> {
    let mut is_text = false;
    let mut is_escaped = false;
    for (at, c) in action.char_indices() {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' if is_text => is_escaped = true,
            '"' => is_text = !is_text,
            '}' if !is_text && action[at..].starts_with("}}") => return Some(at),
            _ => {}
        }
    }
    None
}

/// The segments of a block, whose head is the first of `segments`: the segments up to the `else`, the segments from the `else`
/// on, and the number of the segment that ends the block.
fn block<'s, 't>(segments: &'s [Segment<'t>]) -> TemplateResult<(&'s [Segment<'t>], &'s [Segment<'t>], usize)> {
    let mut depth = 0;
    let mut other = None;
    for (at, segment) in segments.iter().enumerate() {
        let Segment::Action(action) = segment else { continue };
        match action.split_whitespace().next().unwrap_or_default() {
            "if" | "range" => depth += 1,
            "else" if depth == 1 && other.is_none() => other = Some(at),
            "end" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            let first_end = other.unwrap_or(at);
            return Ok((&segments[1..first_end], &segments[first_end..at], at));
        }
    }
    Err("a block has no end".into())
}

/// What an action sees.
struct TemplateScope<'a> {
    input: TemplateInput<'a>,
    /// The value of `.`: in a loop the item, else all data.
    dot: Value,
    variables: Vec<(String, Value)>,
}

impl TemplateScope<'_> {
    fn render(&self, segments: &[Segment<'_>], out: &mut String) -> TemplateResult<()> {
        let mut at = 0;
        while let Some(segment) = segments.get(at) {
            at += 1;
            let action = match segment {
                Segment::Text(text) => {
                    out.push_str(text);
                    continue;
                }
                Segment::Action(action) => *action,
            };
            let at_action = |why: String| format!("{{{{ {action} }}}}: {why}");
            if let Some(condition) = action.strip_prefix("if ") {
                let (then, other, length) = block(&segments[at - 1..]).map_err(at_action)?;
                at += length;
                let is_true = is_set(&self.evaluate(condition).map_err(at_action)?);
                if is_true { self.render(then, out)? } else { self.render_else(other, out)? }
            } else if let Some(head) = action.strip_prefix("range ") {
                let (body, _, length) = block(&segments[at - 1..]).map_err(at_action)?;
                at += length;
                self.render_loop(head, body, out).map_err(at_action)?;
            } else {
                out.push_str(&plain(&self.evaluate(action).map_err(at_action)?));
            }
        }
        Ok(())
    }

    /// The segments from an `else` on; none where there is no `else`.
    fn render_else(&self, segments: &[Segment<'_>], out: &mut String) -> TemplateResult<()> {
        let Some((Segment::Action(head), body)) = segments.split_first() else { return Ok(()) };
        match head.strip_prefix("else ") {
            // `else if` is an `if` within the `else`.
            Some(condition) => {
                self.render(&[&[Segment::Action(condition)], body, &[Segment::Action("end")]].concat(), out)
            }
            None => self.render(body, out),
        }
    }

    /// `range LIST` and `range $number, $item := LIST`.
    fn render_loop(&self, head: &str, body: &[Segment<'_>], out: &mut String) -> TemplateResult<()> {
        let (names, list) = head.split_once(":=").unwrap_or(("", head));
        let names: Vec<&str> = names.split(',').map(str::trim).collect();
        let Value::Array(items) = self.evaluate(list)? else { return Err("no list".into()) };
        for (number, item) in items.into_iter().enumerate() {
            let mut variables = self.variables.clone();
            if let [number_name, item_name] = names[..] {
                variables.push((number_name.to_owned(), Value::from(number)));
                variables.push((item_name.to_owned(), item.clone()));
            }
            TemplateScope { input: self.input, dot: item, variables }.render(body, out)?;
        }
        Ok(())
    }

    fn evaluate(&self, expression: &str) -> TemplateResult<Value> {
        let words = words(expression)?;
        let mut words = words.as_slice();
        let value = self.pipeline(&mut words)?;
        if words.is_empty() { Ok(value) } else { Err(format!("'{}' is too much", words.join(" "))) }
    }

    /// Takes `A | f | g 1` from the words, up to the end or a closing bracket.
    fn pipeline(&self, words: &mut &[&str]) -> TemplateResult<Value> {
        let mut value = self.command(words, None)?;
        while let ["|", rest @ ..] = *words {
            *words = rest;
            value = self.command(words, Some(value))?;
        }
        Ok(value)
    }

    /// Takes a call of a function with arguments, or a single value. The value before a `|` is the last argument.
    fn command(&self, words: &mut &[&str], piped: Option<Value>) -> TemplateResult<Value> {
        let function = match *words {
            [word, rest @ ..] if word.starts_with(|c: char| c.is_ascii_alphabetic()) => {
                *words = rest;
                *word
            }
            _ => return self.operand(words),
        };
        let mut arguments = Vec::new();
        while !matches!(words.first(), None | Some(&("|" | ")"))) {
            arguments.push(self.operand(words)?);
        }
        arguments.extend(piped);
        self.call(function, &arguments)
    }

    fn operand(&self, words: &mut &[&str]) -> TemplateResult<Value> {
        let [word, rest @ ..] = *words else { return Err("a value is missing".into()) };
        *words = rest;
        if *word == "(" {
            let value = self.pipeline(words)?;
            let [")", rest @ ..] = *words else { return Err("')' is missing".into()) };
            *words = rest;
            return Ok(value);
        }
        if word.starts_with(['.', '$']) {
            return self.find(word);
        }
        // Texts and numbers are written as in JSON.
        serde_json::from_str(word).map_err(|_| format!("'{word}' is no value"))
    }

    /// The value at `.path`, `$.path` or `$variable`.
    fn find(&self, word: &str) -> TemplateResult<Value> {
        let (name, path) = word.split_once('.').unwrap_or((word, ""));
        let start = match name {
            "" => &self.dot,
            "$" => self.input.data,
            name => match self.variables.iter().rfind(|(known, _)| known == name) {
                Some((_, value)) => value,
                None => return Err(format!("{name} is no variable")),
            },
        };
        let found = path.split('.').filter(|key| !key.is_empty()).try_fold(start, |value, key| value.get(key));
        found.cloned().ok_or_else(|| format!("there is no {word}"))
    }

    fn call(&self, function: &str, arguments: &[Value]) -> TemplateResult<Value> {
        Ok(match (function, arguments) {
            ("quote", [value]) => Value::String(Value::String(plain(value)).to_string()),
            ("toJson", [value]) => Value::String(value.to_string()),
            ("toPrettyJson", [value]) => Value::String(format!("{value:#}")),
            ("nindent", [width, text]) => {
                let line_start = format!("\n{:1$}", "", width.as_u64().unwrap_or(0) as usize);
                Value::String(format!("{line_start}{}", plain(text).replace('\n', &line_start)))
            }
            ("print", parts) => Value::String(parts.iter().map(plain).collect()),
            ("printf", [form, values @ ..]) => {
                let form = plain(form).replace("%v", "%s");
                let mut values = values.iter();
                let mut parts = form.split("%s");
                let first = parts.next().unwrap_or_default().to_owned();
                Value::String(
                    parts.fold(first, |text, part| text + &values.next().map(plain).unwrap_or_default() + part),
                )
            }
            ("join", [separator, Value::Array(items)]) => {
                Value::String(items.iter().map(plain).collect::<Vec<_>>().join(&plain(separator)))
            }
            ("splitList", [separator, text]) => {
                plain(text).split(&plain(separator)).map(str::to_owned).map(Value::String).collect()
            }
            ("list", items) => Value::Array(items.to_vec()),
            ("len", [Value::Array(items)]) => Value::from(items.len()),
            ("default", [other, value]) => if is_set(value) { value } else { other }.clone(),
            ("eq", [left, right]) => Value::Bool(left == right),
            ("ne", [left, right]) => Value::Bool(left != right),
            ("not", [value]) => Value::Bool(!is_set(value)),
            ("and", [.., last]) => arguments.iter().find(|value| !is_set(value)).unwrap_or(last).clone(),
            ("or", [.., last]) => arguments.iter().find(|value| is_set(value)).unwrap_or(last).clone(),
            ("include", [path, _]) => {
                let path = plain(path);
                let template = self.input.templates.iter().find(|(known, _)| *known == path);
                let (_, template) = template.ok_or_else(|| format!("there is no template {path}"))?;
                Value::String(render_template(template, self.input)?)
            }
            ("sha256sum", [text]) => {
                let mut hex = String::new();
                for byte in digest(&SHA256, plain(text).as_bytes()).as_ref() {
                    let _ = write!(hex, "{byte:02x}");
                }
                Value::String(hex)
            }
            _ => return Err(format!("{function} is unknown, or has other arguments")),
        })
    }
}

/// The words of an expression: texts in quotes, brackets, `|`, and parts between white space.
fn words(expression: &str) -> TemplateResult<Vec<&str>> {
    let mut words = Vec::new();
    let mut rest = expression.trim_start();
    while let Some(first) = rest.chars().next() {
        let length = match first {
            '(' | ')' | '|' => 1,
            '"' => {
                let mut is_escaped = false;
                let end = rest[1..].find(|c| {
                    let is_end = c == '"' && !is_escaped;
                    is_escaped = c == '\\' && !is_escaped;
                    is_end
                });
                end.ok_or("a text has no end")? + 2
            }
            _ => rest.find(|c: char| c.is_whitespace() || "()|".contains(c)).unwrap_or(rest.len()),
        };
        let (word, behind) = rest.split_at(length);
        words.push(word);
        rest = behind.trim_start();
    }
    Ok(words)
}

/// Whether a value holds as a condition: true, or not empty.
fn is_set(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Bool(on) => *on,
        Value::String(text) => !text.is_empty(),
        Value::Array(items) => !items.is_empty(),
        Value::Object(keys) => !keys.is_empty(),
        Value::Number(number) => number.as_f64() != Some(0.0),
    }
}

/// A value as text.
fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn rendered(template: &str) -> TemplateResult<String> {
        let data =
            json!({ "Values": { "on": true, "off": "", "port": 7000, "dirs": ["/a", "/b"], "map": { "k": "v" } } });
        render_template(template, TemplateInput { data: &data, templates: &[("t/x", "x is {{ .Values.port }}")] })
    }

    #[test]
    fn actions_are_those_of_helm() {
        for (template, text) in [
            ("a {{ .Values.port }}}", "a 7000}"),
            ("{{ printf \"%s:%v}}\" \"h\" .Values.port | quote }}", "\"h:7000}}\""),
            ("a:\n  {{- if .Values.on }}\n  b\n  {{- else }}\n  c\n  {{- end }}\nd", "a:\n  b\nd"),
            ("{{ if .Values.off }}a{{ else if not .Values.on }}b{{ else if .Values.on }}c{{ else }}d{{ end }}", "c"),
            (
                "{{ if .Values.off }}a{{ else if .Values.off }}b{{ else }}{{ if .Values.off }}c{{ else }}d{{ end }}{{ end }}",
                "d",
            ),
            (
                "{{ range $n, $d := .Values.dirs }}{{ $n }}{{ . }}{{ $d }}{{ $.Values.port }} {{ end }}",
                "0/a/a7000 1/b/b7000 ",
            ),
            ("{{ join \":\" .Values.dirs }} {{ splitList \"/\" \"a/b/c\" | len }}", "/a:/b 3"),
            (
                "{{ .Values.off | default (print \"x\" .Values.port) }} {{ .Values.map | toJson }}",
                "x7000 {\"k\":\"v\"}",
            ),
            ("f: |\n  {{- .Values.map | toPrettyJson | nindent 2 }}\n", "f: |\n  {\n    \"k\": \"v\"\n  }\n"),
            ("{{ and .Values.on (eq .Values.port 7000) }} {{ or .Values.off (ne \"a\" \"b\") }}", "true true"),
            ("{{ include \"t/x\" . }}", "x is 7000"),
            ("{{ \"abc\" | sha256sum }}", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
        ] {
            assert_eq!(rendered(template).as_deref(), Ok(text), "{template}");
        }
    }

    #[test]
    fn anything_else_is_an_error() {
        for (template, says) in [
            ("{{ .Values.absent }}", "{{ .Values.absent }}: there is no .Values.absent"),
            ("{{ lower \"A\" }}", "lower is unknown"),
            ("{{ $x }}", "$x is no variable"),
            ("{{ if .Values.on }}", "a block has no end"),
            ("{{ \"a }}", "has no end"),
            ("{{ (.Values.on }}", "')' is missing"),
            ("{{ range .Values.on }}{{ end }}", "no list"),
            ("{{ .Values.on .Values.off }}", "is too much"),
        ] {
            let said = rendered(template).unwrap_err();
            assert!(said.contains(says), "{template}: {said}");
        }
    }
}
