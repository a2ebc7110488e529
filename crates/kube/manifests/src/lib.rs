//! The manifests of a cluster: the Helm chart of `deploy/helm`, and the objects for a person's values as plain YAML and as a
//! Kustomize base. Prints and writes nothing, and talks to no cluster.
#![forbid(unsafe_code)]

mod chart;
mod checks;
mod forms;
mod rules;
mod schema;
mod template;
mod values;
mod yaml;

pub use chart::DEFAULT_VALUES;
pub use forms::{FIRST_LINE, ManifestForm, RenderedFile, render};
pub use values::ClusterValues;
