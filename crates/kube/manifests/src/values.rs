//! The values of a cluster: the defaults, a person's file and settings on top, and the check of names. Knows no object.

use crate::chart::DEFAULT_VALUES;
use serde_json::{Map, Value};
use spurline_config::Fault;
use spurline_config::values::nearest_word;
use std::collections::BTreeSet;

/// Maps of labels.
pub(crate) const LABELS: [&str; 2] = ["nodeSelector", "labels"];
/// The map that is a separate configuration.
pub(crate) const DEVICE_CONFIG: &str = "config";

/// The values of a cluster, complete.
#[derive(Debug, Clone, PartialEq)]
pub struct ClusterValues {
    tree: Value,
    /// The paths of the values that a person has given, also of values that equal the defaults.
    given: BTreeSet<String>,
}

impl ClusterValues {
    /// The defaults.
    ///
    /// # Errors
    /// Never, as a test reads the defaults.
    pub fn defaults() -> Result<Self, Fault> {
        let tree = parse_yaml("the default values", DEFAULT_VALUES)?;
        Ok(ClusterValues { tree, given: BTreeSet::new() })
    }

    /// The defaults with a values file on top.
    ///
    /// # Errors
    /// When the text is no YAML, a key is unknown, or a value has another type than the default.
    pub fn with_file(self, name: &str, text: &str) -> Result<Self, Fault> {
        let over = parse_yaml(name, text)?;
        if over.is_null() { Ok(self) } else { self.with_tree(over, name) }
    }

    /// The values with a setting `key.key=value` on top.
    ///
    /// # Errors
    /// As [`ClusterValues::with_file`].
    pub fn with_setting(self, setting: &str) -> Result<Self, Fault> {
        let Some((path, value)) = setting.split_once('=') else {
            return Err(Fault::usage(
                format!("--set {setting} has no value"),
                "write --set KEY=VALUE, with dots in KEY",
            ));
        };
        self.with_text(path, "--set", value)
    }

    /// The values with a text at a path with dots: unchanged where a text is wanted, else read as YAML. `name` says where the
    /// text is from.
    ///
    /// # Errors
    /// As [`ClusterValues::with_file`].
    pub fn with_text(self, path: &str, name: &str, text: &str) -> Result<Self, Fault> {
        if let Some((map, key)) = label_of(path) {
            // Several settings of the same map add up.
            let mut labels = self.find(map).and_then(Value::as_object).cloned().unwrap_or_default();
            labels.insert(key, Value::String(text.to_owned()));
            return self.with_tree(nested(map, Value::Object(labels)), name);
        }
        let over = match self.find(path) {
            // A word that looks like a number stays a word where a word is wanted.
            Some(Value::String(_)) => Value::String(text.to_owned()),
            _ => parse_yaml(name, text)?,
        };
        self.with_tree(nested(path, over), name)
    }

    /// The values with others on top.
    fn with_tree(mut self, over: Value, name: &str) -> Result<Self, Fault> {
        merge(&mut self.tree, over, name, "", &mut self.given)?;
        Ok(self)
    }

    /// Whether a person has given the value at a path with dots.
    pub fn is_given(&self, path: &str) -> bool {
        self.given.contains(path)
    }

    /// The value at a path with dots.
    pub fn find(&self, path: &str) -> Option<&Value> {
        path.split('.').try_fold(&self.tree, |value, key| value.get(key))
    }

    /// The text at a path with dots; empty where there is none.
    pub fn text(&self, path: &str) -> &str {
        self.find(path).and_then(Value::as_str).unwrap_or_default()
    }

    /// Whether the value at a path with dots is true.
    pub fn is_on(&self, path: &str) -> bool {
        self.find(path).is_some_and(|value| value == true)
    }

    pub(crate) fn tree(&self) -> &Value {
        &self.tree
    }
}

/// The map of labels that a path leads into, and the label. Labels have dots, which Helm wants with a backslash.
fn label_of(path: &str) -> Option<(&str, String)> {
    LABELS.iter().find_map(|map| {
        let (before, key) = path.split_once(&format!(".{map}."))?;
        Some((&path[..before.len() + 1 + map.len()], key.replace("\\.", ".")))
    })
}

/// A value below the keys of a path with dots.
fn nested(path: &str, value: Value) -> Value {
    path.rsplit('.').fold(value, |below, key| Value::Object(Map::from_iter([(key.to_owned(), below)])))
}

fn parse_yaml(name: &str, text: &str) -> Result<Value, Fault> {
    serde_saphyr::from_str(text).map_err(|e| {
        let text = e.to_string();
        let first = text.lines().next().unwrap_or_default();
        // The library's advice is for programs.
        let what = [", set DuplicateKeyPolicy", "; use from_"]
            .iter()
            .fold(first, |text, advice| text.split_once(advice).map_or(text, |(before, _)| before));
        let remedy = if what.len() < first.len() {
            "write each key once, and all of them in one document"
        } else {
            "correct the named line"
        };
        Fault::usage(format!("{name} is not YAML: {}", what.trim_start_matches("error: ")), remedy)
    })
}

/// Puts `over` on top of `base`, whose keys are the known keys, and notes the paths in `given`.
fn merge(base: &mut Value, over: Value, name: &str, at: &str, given: &mut BTreeSet<String>) -> Result<(), Fault> {
    let last = at.rsplit('.').next().unwrap_or_default();
    let free = LABELS.contains(&last) || last == DEVICE_CONFIG;
    match (base, over) {
        (Value::Object(known), Value::Object(over)) if !free => {
            for (key, value) in over {
                let path = if at.is_empty() { key.clone() } else { format!("{at}.{key}") };
                let Some(below) = known.get_mut(&key) else {
                    let remedy = match nearest_word(&key, known.keys().map(String::as_str)) {
                        Some(near) => format!("did you mean {near}?"),
                        None => format!("the keys there are {}", known.keys().cloned().collect::<Vec<_>>().join(", ")),
                    };
                    return Err(Fault::usage(format!("{name} has the unknown key {path}"), remedy));
                };
                merge(below, value, name, &path, given)?;
            }
            Ok(())
        }
        (base, over) => {
            if kind(base) != kind(&over) {
                let what = match at {
                    "" => format!("{name} has {} at its root, not keys of values", kind(&over)),
                    at => format!("{name}: {at} is {}, not {}", kind(base), kind(&over)),
                };
                return Err(Fault::usage(what, "see the comments in the defaults: spurline k8s render --print-values"));
            }
            *base = over;
            given.insert(at.to_owned());
            Ok(())
        }
    }
}

/// The type of a value, in words.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "a map",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn files_and_settings_lie_over_the_defaults() {
        let values = ClusterValues::defaults().unwrap();
        let values = values.with_file("v", "nodes:\n  port: 7100\n  nodeSelector: {disk: nvme}\n").unwrap();
        let values = values.with_setting("csi.memory=2Gi").unwrap().with_setting("nodes.port=7200").unwrap();
        assert_eq!(values.find("nodes.port"), Some(&Value::from(7200)));
        assert_eq!(values.find("csi.memory"), Some(&Value::from("2Gi")));
        assert_eq!(values.find("nodes.nodeSelector.disk"), Some(&Value::from("nvme")));
        assert_eq!(values.clone().with_file("v", "").unwrap(), values);
        // Also a value that is that of the defaults.
        let same = values.clone().with_file("v", "nodes: {cacheSize: 100G}").unwrap();
        assert!(same.is_given("nodes.cacheSize") && same.is_given("csi.memory") && !same.is_given("nodes.memory"));
        let values = values.with_setting("nodes.nodeSelector.node-role.kubernetes.io/cache=").unwrap();
        let values = values.with_setting(r"nodes.nodeSelector.spurline\.io/zone=1").unwrap();
        let wanted = json!({ "disk": "nvme", "node-role.kubernetes.io/cache": "", "spurline.io/zone": "1" });
        assert_eq!(values.find("nodes.nodeSelector"), Some(&wanted));
        let values = values.with_text("devicePlugin.config", "c.json", r#"{"configList": []}"#).unwrap();
        assert_eq!(values.find("devicePlugin.config"), Some(&json!({ "configList": [] })));
    }

    #[test]
    fn wrong_values_are_refused_with_the_nearest() {
        let defaults = || ClusterValues::defaults().unwrap();
        for (text, says) in [
            ("node: {}", "did you mean nodes?"),
            ("nodes: {prot: 1}", "unknown key nodes.prot; did you mean port?"),
            ("nodes: {port: high}", "nodes.port is a number, not a text"),
            ("nodes: [1]", "nodes is a map, not a list"),
            ("{", "is not YAML: line 1"),
            ("image: a\nimage: b", "line 2 column 1: duplicate mapping key: image; write each key once"),
            ("image: a\n---\nimage: b", "multiple YAML documents detected; write each key once"),
            ("[1]", "v has a list at its root"),
        ] {
            let said = defaults().with_file("v", text).unwrap_err().to_string();
            assert!(said.contains(says) && !said.contains('\n'), "{said}");
        }
        for (setting, says) in
            [("nodes.port", "has no value"), ("a.b=1", "unknown key a"), ("nodes.port=x", "a number")]
        {
            let said = defaults().with_setting(setting).unwrap_err().to_string();
            assert!(said.contains(says), "{said}");
        }
    }
}
