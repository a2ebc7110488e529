//! The forms of the manifests: a text, a Kustomize base, a Helm chart.

use crate::chart::{CHART_TEMPLATES, CHART_TEXTS, DEFAULT_VALUES, FileObjects, cluster_objects};
use crate::checks::check_values;
use crate::schema::schema_text;
use crate::values::ClusterValues;
use crate::yaml::print;
use serde_json::{Value, json};
use spurline_config::Fault;
use std::fmt::Write as _;

/// A form of the manifests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ManifestForm {
    /// A file for `kubectl apply -f`.
    Yaml,
    /// A directory for `kubectl apply -k`.
    Kustomize,
    /// A directory for `helm install`.
    Helm,
}

/// A file of a form, by path in the form's directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedFile {
    /// The path.
    pub path: String,
    /// The content.
    pub text: String,
}

/// The first line of every file that is made of objects.
pub const FIRST_LINE: &str = "# Made by 'spurline k8s render'; change the values, not this file.\n";

/// The manifests for `values` in a form.
///
/// # Errors
/// When a value is wrong, or two contradict each other.
pub fn render(values: &ClusterValues, form: ManifestForm) -> Result<Vec<RenderedFile>, Fault> {
    check_values(values)?;
    Ok(match form {
        ManifestForm::Yaml => {
            let objects: Vec<Value> = cluster_objects(values)?.into_iter().flat_map(|file| file.objects).collect();
            vec![RenderedFile { path: "spurline.yaml".into(), text: documents(&objects) }]
        }
        ManifestForm::Kustomize => kustomize_files(&cluster_objects(values)?),
        ManifestForm::Helm => chart_files(values)?,
    })
}

fn documents(objects: &[Value]) -> String {
    let mut text = FIRST_LINE.to_owned();
    for object in objects {
        let _ = write!(text, "---\n{}", print(object));
    }
    text
}

fn kustomize_files(files: &[FileObjects]) -> Vec<RenderedFile> {
    let kustomization = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": files.iter().map(|file| file.file).collect::<Vec<_>>(),
    });
    let text = format!("{FIRST_LINE}{}", print(&kustomization));
    let mut rendered = vec![RenderedFile { path: "kustomization.yaml".into(), text }];
    rendered.extend(files.iter().map(|file| RenderedFile { path: file.file.into(), text: documents(&file.objects) }));
    rendered
}

fn chart_files(values: &ClusterValues) -> Result<Vec<RenderedFile>, Fault> {
    // A person's values become the chart's defaults; without any, the file with comments is the default.
    let has_defaults = ClusterValues::defaults()? == *values;
    let defaults = if has_defaults { DEFAULT_VALUES.to_owned() } else { print(values.tree()) };
    let mut files = vec![
        RenderedFile { path: "values.yaml".into(), text: defaults },
        RenderedFile { path: "values.schema.json".into(), text: schema_text(values) },
    ];
    let texts = CHART_TEXTS.into_iter().chain(CHART_TEMPLATES);
    files.extend(texts.map(|(path, text)| RenderedFile { path: path.into(), text: text.into() }));
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chart_has_the_version_of_the_program() {
        let chart: Value = serde_saphyr::from_str(CHART_TEXTS[0].1).unwrap();
        assert_eq!((&chart["version"], &chart["appVersion"]), (&json!(env!("CARGO_PKG_VERSION")), &chart["version"]));
    }
}
