//! Configurations of device plugins inside objects of Kubernetes: a ConfigMap, the NicClusterPolicy of NVIDIA's network operator,
//! or another object with the file's text in a field. Does not know the rules of a configuration.

use serde_json::Value;

/// The key of a configuration of the shared device plugin, in small letters.
const CONFIG_KEY: &str = "\"configlist\"";
/// The key of a configuration of the SR-IOV network device plugin.
const LIST_KEY: &str = "\"resourcelist\"";

/// A configuration found in an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmbeddedConfig {
    /// `NicClusterPolicy/name`.
    pub object: String,
    /// The file's text.
    pub text: String,
}

/// The configurations in the objects of a manifest, YAML or JSON; none where the text is a configuration itself.
pub fn embedded_configs(manifest: &str) -> Vec<EmbeddedConfig> {
    let Ok(documents) = serde_saphyr::from_multiple::<Value>(manifest) else { return Vec::new() };
    let mut found = Vec::new();
    for document in &documents {
        search_object(document, CONFIG_KEY, &mut found);
    }
    found
}

/// The lists of the SR-IOV network device plugin in an object.
pub(crate) fn embedded_lists(document: &Value) -> Vec<EmbeddedConfig> {
    let mut found = Vec::new();
    search_object(document, LIST_KEY, &mut found);
    found
}

fn search_object(document: &Value, key: &str, found: &mut Vec<EmbeddedConfig>) {
    let Some(kind) = document["kind"].as_str() else { return };
    let name = document["metadata"]["name"].as_str().unwrap_or("unnamed");
    search_texts(document, &format!("{kind}/{name}"), key, found);
}

fn search_texts(value: &Value, object: &str, key: &str, found: &mut Vec<EmbeddedConfig>) {
    match value {
        Value::String(text) if is_config(text, key) => {
            found.push(EmbeddedConfig { object: object.to_owned(), text: text.clone() });
        }
        Value::Array(items) => items.iter().for_each(|item| search_texts(item, object, key, found)),
        Value::Object(entries) => {
            // The copy that kubectl keeps of an applied object has the same text again.
            let fields = entries.iter().filter(|(key, _)| key.as_str() != "annotations");
            fields.for_each(|(_, field)| search_texts(field, object, key, found));
        }
        _ => {}
    }
}

/// Whether a text is meant as a configuration; mistakes there are a matter of the findings.
fn is_config(text: &str, key: &str) -> bool {
    text.trim_start().starts_with('{') && text.to_ascii_lowercase().contains(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_is_found_in_objects_of_any_kind() {
        let config = "{\"configList\": []}";
        let objects = format!(
            "kind: NicClusterPolicy\nmetadata: {{name: nic}}\nspec:\n  rdmaSharedDevicePlugin:\n    config: |\n      {config}\n\
             ---\nkind: ConfigMap\nmetadata: {{name: map, annotations: {{last: '{config}'}}}}\ndata:\n  config.json: '{config}'\n"
        );
        let found = embedded_configs(&objects);
        let names: Vec<&str> = found.iter().map(|config| config.object.as_str()).collect();
        assert_eq!(names, ["NicClusterPolicy/nic", "ConfigMap/map"]);
        assert_eq!(found[0].text.trim(), config);
        assert!(embedded_configs(config).is_empty(), "the file itself");
        assert!(embedded_configs("kind: ConfigMap\ndata: {a: b}").is_empty() && embedded_configs("{").is_empty());
    }
}
