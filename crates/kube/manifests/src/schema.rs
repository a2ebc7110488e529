//! The chart's schema of values, from the defaults and the rules.

use crate::rules::{ValueRule, rule_of};
use crate::values::{ClusterValues, DEVICE_CONFIG, LABELS};
use serde_json::{Map, Value, json};

/// The text of `values.schema.json`.
pub(crate) fn schema_text(values: &ClusterValues) -> String {
    let mut schema = schema_of("", values.tree());
    schema["$schema"] = json!("http://json-schema.org/draft-07/schema#");
    // Helm gives this value to a chart that is part of another.
    schema["properties"]["global"] = json!({ "type": "object" });
    // The usual condition of such a part, which the values then have.
    schema["properties"]["enabled"] = json!({ "type": "boolean" });
    let text = serde_json::to_string_pretty(&schema).unwrap_or_default();
    format!("{text}\n")
}

fn schema_of(path: &str, value: &Value) -> Value {
    match rule_of(path) {
        Some(ValueRule::Words(words)) => return json!({ "enum": words }),
        Some(ValueRule::Number(least, most)) => return json!({ "type": "integer", "minimum": least, "maximum": most }),
        Some(ValueRule::Text(_)) => return json!({ "type": "string", "minLength": 1 }),
        Some(ValueRule::TextOrEmpty(_)) => return json!({ "type": "string" }),
        Some(ValueRule::Texts(_)) => return json!({ "type": "array", "items": { "type": "string", "minLength": 1 } }),
        Some(ValueRule::Objects) => return json!({ "type": "array", "items": { "type": "object" } }),
        None => {}
    }
    let last = path.rsplit('.').next().unwrap_or_default();
    match value {
        Value::Object(_) if LABELS.contains(&last) => {
            json!({ "type": "object", "additionalProperties": { "type": "string" } })
        }
        Value::Object(_) if last == DEVICE_CONFIG => json!({ "type": "object", "required": ["configList"] }),
        Value::Object(keys) => {
            let properties: Map<String, Value> = keys
                .iter()
                .map(|(key, value)| {
                    let at = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                    (key.clone(), schema_of(&at, value))
                })
                .collect();
            json!({ "type": "object", "additionalProperties": false, "properties": properties })
        }
        _ => json!({ "type": "boolean" }),
    }
}
