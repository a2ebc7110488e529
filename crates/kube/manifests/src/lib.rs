//! The manifests of a cluster, from one source in three forms: plain YAML, a Kustomize base and a Helm chart. It prints
//! and writes nothing itself, and talks to no cluster.
#![forbid(unsafe_code)]

mod checks;
mod cluster;
mod context;
mod devices;
mod forms;
mod rules;
mod schema;
mod values;
mod volumes;
mod yaml;

pub use forms::{FIRST_LINE, ManifestForm, RenderedFile, render};
pub use values::{ClusterValues, DEFAULT_VALUES};

use context::ValueCondition;
use serde_json::Value;

/// An object, the file that it belongs to, and when it exists.
#[derive(Debug, Clone)]
struct ManifestObject {
    file: &'static str,
    conditions: Vec<ValueCondition>,
    object: Value,
}

impl ManifestObject {
    fn new(file: &'static str, conditions: &[ValueCondition], object: Value) -> Self {
        ManifestObject { file, conditions: conditions.to_vec(), object }
    }
}

/// The program's arguments, texts and lists of them together.
fn args(parts: impl IntoIterator<Item = Vec<Value>>) -> Value {
    Value::Array(parts.into_iter().flatten().collect())
}

/// The labels of a part.
fn labels(part: &str) -> Value {
    serde_json::json!({
        "app.kubernetes.io/name": format!("spurline-{part}"),
        "app.kubernetes.io/part-of": "spurline",
    })
}
