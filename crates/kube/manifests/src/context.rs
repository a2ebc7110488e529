//! Where an object's fields come from: values of this cluster, or expressions of a chart. Builders of objects use only
//! this, so that both forms have one source.

use crate::values::ClusterValues;
use crate::yaml::{block, expression, key_block};
use serde_json::{Map, Value};

/// The form of what is built, with the values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FieldSource<'a> {
    pub values: &'a ClusterValues,
    /// Expressions of Helm in place of values.
    pub chart: bool,
}

/// A condition on a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ValueCondition {
    /// True, or not empty.
    Set(&'static str),
    /// False or empty.
    Unset(&'static str),
    /// This word.
    Is(&'static str, &'static str),
    /// All conditions of one of these groups.
    Any(&'static [&'static [ValueCondition]]),
}

impl ValueCondition {
    fn expression(self) -> String {
        match self {
            ValueCondition::Set(path) => format!(".Values.{path}"),
            ValueCondition::Unset(path) => format!("not .Values.{path}"),
            ValueCondition::Is(path, word) => format!("eq .Values.{path} \"{word}\""),
            ValueCondition::Any(groups) => {
                let parts: Vec<String> = groups.iter().map(|group| format!("({})", all_of(group))).collect();
                format!("or {}", parts.join(" "))
            }
        }
    }
}

/// All of the conditions as one expression.
pub(crate) fn all_of(conditions: &[ValueCondition]) -> String {
    match conditions {
        [one] => one.expression(),
        many => {
            let parts: Vec<String> = many.iter().map(|one| format!("({})", one.expression())).collect();
            format!("and {}", parts.join(" "))
        }
    }
}

impl FieldSource<'_> {
    fn at(&self, path: &str) -> &Value {
        self.values.find(path).unwrap_or(&Value::Null)
    }

    /// The namespace.
    pub(crate) fn namespace(&self) -> Value {
        if self.chart { expression(".Release.Namespace | quote") } else { self.at("namespace").clone() }
    }

    /// A value as it is.
    pub(crate) fn value(&self, path: &str) -> Value {
        let value = self.at(path);
        match (self.chart, value) {
            (false, value) => value.clone(),
            (true, Value::String(_)) => expression(&format!(".Values.{path} | quote")),
            (true, Value::Array(_) | Value::Object(_)) => expression(&format!(".Values.{path} | toJson")),
            (true, _) => expression(&format!(".Values.{path}")),
        }
    }

    /// A text with a value at `{}`.
    pub(crate) fn text(&self, form: &str, path: &str) -> Value {
        if self.chart {
            return expression(&format!("printf \"{}\" .Values.{path} | quote", form.replace("{}", "%v")));
        }
        Value::String(form.replace("{}", &plain(self.at(path))))
    }

    /// A text with the list's items, joined, at `{}`.
    pub(crate) fn joined(&self, form: &str, separator: &str, path: &str) -> Value {
        if self.chart {
            let form = form.replace("{}", "%s");
            return expression(&format!("printf \"{form}\" (join \"{separator}\" .Values.{path}) | quote"));
        }
        let items: Vec<String> = self.at(path).as_array().into_iter().flatten().map(plain).collect();
        Value::String(form.replace("{}", &items.join(separator)))
    }

    /// A text with the registry's URL at `{}`.
    pub(crate) fn registry(&self, form: &str) -> Value {
        if self.chart {
            let own =
                "printf \"coordinator://spurline-coordinator.%s.svc:%v\" .Release.Namespace .Values.coordinator.port";
            let form = form.replace("{}", "%s");
            return expression(&format!("printf \"{form}\" (.Values.registry | default ({own})) | quote"));
        }
        let url = match self.at("registry").as_str() {
            Some(url) if !url.is_empty() => url.to_owned(),
            _ => format!(
                "coordinator://spurline-coordinator.{}.svc:{}",
                plain(self.at("namespace")),
                plain(self.at("coordinator.port"))
            ),
        };
        Value::String(form.replace("{}", &url))
    }

    /// Whether a condition holds for the values.
    pub(crate) fn holds(&self, condition: ValueCondition) -> bool {
        let is_set = |path: &str| match self.at(path) {
            Value::Null => false,
            Value::Bool(on) => *on,
            Value::String(text) => !text.is_empty(),
            Value::Array(items) => !items.is_empty(),
            Value::Object(keys) => !keys.is_empty(),
            Value::Number(number) => number.as_f64() != Some(0.0),
        };
        match condition {
            ValueCondition::Set(path) => is_set(path),
            ValueCondition::Unset(path) => !is_set(path),
            ValueCondition::Is(path, word) => self.at(path) == word,
            ValueCondition::Any(groups) => groups.iter().any(|group| group.iter().all(|one| self.holds(*one))),
        }
    }

    /// Whether conditions hold, as a value.
    pub(crate) fn truth(&self, conditions: &[ValueCondition]) -> Value {
        match self.chart {
            true => expression(&format!("if {} }}}}true{{{{ else }}}}false{{{{ end", all_of(conditions))),
            false => Value::Bool(conditions.iter().all(|one| self.holds(*one))),
        }
    }

    /// The first of two texts that is not empty.
    pub(crate) fn either(&self, first: &'static str, second: &str) -> Value {
        match self.chart {
            true => expression(&format!(".Values.{first} | default .Values.{second} | quote")),
            false if self.holds(ValueCondition::Set(first)) => self.value(first),
            false => self.value(second),
        }
    }

    /// Items of a list that exist under a condition.
    pub(crate) fn items_if(&self, condition: ValueCondition, items: Vec<Value>) -> Vec<Value> {
        match self.chart {
            true => vec![block(&format!("if {}", condition.expression()), items)],
            false if self.holds(condition) => items,
            false => Vec::new(),
        }
    }

    /// Items of a list, one for each item of a value; `make` gets the number and the text of the item.
    pub(crate) fn items_of(&self, path: &str, make: impl Fn(&ListItem) -> Vec<Value>) -> Vec<Value> {
        if self.chart {
            let head = format!("range $number, $item := .Values.{path}");
            return vec![block(&head, make(&ListItem(None)))];
        }
        let items = self.at(path).as_array().into_iter().flatten().map(plain);
        items.enumerate().flat_map(|(number, item)| make(&ListItem(Some((number, item))))).collect()
    }

    /// Puts keys into a map, under a condition.
    pub(crate) fn keys_if(&self, into: &mut Value, condition: ValueCondition, keys: &Value) {
        let (Value::Object(into), Value::Object(keys)) = (into, keys.clone()) else { return };
        if self.chart {
            into.extend([key_block(&format!("if {}", condition.expression()), keys)]);
        } else if self.holds(condition) {
            into.extend(keys);
        }
    }

    /// Limits of a container: its memory, and where a resource is named as many of its devices as `names` has names.
    pub(crate) fn limits(&self, memory: &str, resource: &str, names: &str) -> Value {
        if self.chart {
            let (memory, resource) = (format!(".Values.{memory}"), format!(".Values.{resource}"));
            return expression(&format!(
                "if {resource} }}}}{{{{ dict \"memory\" {memory} {resource} (splitList \":\" .Values.{names} | len) | toJson \
                 }}}}{{{{ else }}}}{{{{ dict \"memory\" {memory} | toJson }}}}{{{{ end"
            ));
        }
        let mut limits = Map::from_iter([("memory".to_owned(), self.value(memory))]);
        if let Some(name) = self.at(resource).as_str().filter(|name| !name.is_empty()) {
            limits.insert(name.to_owned(), Value::from(plain(self.at(names)).split(':').count()));
        }
        Value::Object(limits)
    }
}

impl FieldSource<'_> {
    /// Requests of a container for one device of a resource, where one is named.
    pub(crate) fn limits_of(&self, resource: &str) -> Value {
        if self.chart {
            let path = format!(".Values.{resource}");
            return expression(&format!(
                "if {path} }}}}{{{{ dict \"limits\" (dict {path} 1) | toJson }}}}{{{{ else }}}}{{}}{{{{ end"
            ));
        }
        match self.at(resource).as_str().filter(|name| !name.is_empty()) {
            Some(name) => serde_json::json!({ "limits": { name: 1 } }),
            None => serde_json::json!({}),
        }
    }

    /// A value as the text of a JSON file.
    pub(crate) fn json_text(&self, path: &str) -> Value {
        if self.chart {
            // The first line is indented by the printer.
            return expression(&format!(".Values.{path} | toPrettyJson | indent 4 | trim"));
        }
        let text = serde_json::to_string_pretty(self.at(path)).unwrap_or_default();
        Value::String(format!("{text}\n"))
    }

    /// The text of a CNI configuration with the words MASTER and SUBNET replaced.
    pub(crate) fn network_config(&self, form: &str) -> Value {
        let (master, subnet) = ("networkAttachment.master", "networkAttachment.subnet");
        if self.chart {
            let form = form.replace('"', "\\\"").replace("MASTER", "%s").replace("SUBNET", "%s");
            return expression(&format!("printf \"{form}\" .Values.{master} .Values.{subnet} | quote"));
        }
        Value::String(form.replace("MASTER", &plain(self.at(master))).replace("SUBNET", &plain(self.at(subnet))))
    }
}

/// An item of a list, or the loop's variables in a chart.
#[derive(Debug)]
pub(crate) struct ListItem(Option<(usize, String)>);

impl ListItem {
    /// A text with the item at `{}`.
    pub(crate) fn text(&self, form: &str) -> Value {
        match &self.0 {
            Some((_, item)) => Value::String(form.replace("{}", item)),
            None => expression(&format!("printf \"{}\" $item | quote", form.replace("{}", "%s"))),
        }
    }

    /// A text with the item's number at `{}`.
    pub(crate) fn numbered(&self, form: &str) -> Value {
        match &self.0 {
            Some((number, _)) => Value::String(form.replace("{}", &number.to_string())),
            None => expression(&format!("printf \"{}\" $number | quote", form.replace("{}", "%v"))),
        }
    }
}

/// A scalar as text.
fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
