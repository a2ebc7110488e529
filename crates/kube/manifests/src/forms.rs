//! The forms of the manifests: one text, a Kustomize base, a Helm chart.

use crate::checks::check_values;
use crate::context::{FieldSource, all_of};
use crate::schema::schema_text;
use crate::values::{ClusterValues, DEFAULT_VALUES};
use crate::yaml::print;
use crate::{ManifestObject, cluster, devices, volumes};
use serde_json::json;
use spurline_config::Fault;
use std::fmt::Write as _;

/// A form of the manifests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ManifestForm {
    /// One file for `kubectl apply -f`.
    Yaml,
    /// A directory for `kubectl apply -k`.
    Kustomize,
    /// A directory for `helm install`.
    Helm,
}

/// A file of a form, by its path in the form's directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedFile {
    /// The path.
    pub path: String,
    /// The content.
    pub text: String,
}

/// The first line of every file that is made of objects.
pub const FIRST_LINE: &str = "# Made by 'spurline k8s render'; change the values, not this file.\n";
/// What a person has to know after an installation.
const CHART_NOTES: &str = "Spurline is installed in the namespace {{ .Release.Namespace }}.
Its pods mount file systems. Where Pod Security refuses that, allow it in this namespace:
  kubectl label namespace {{ .Release.Namespace }} pod-security.kubernetes.io/enforce=privileged
{{- if .Values.groupSecret }}
Nodes and volumes need the secret {{ .Values.groupSecret }}:
  kubectl -n {{ .Release.Namespace }} create secret generic {{ .Values.groupSecret }} \
--from-literal=group-token=\"$(openssl rand -base64 32)\"
{{- else }}
There is no groupSecret: nodes accept every host that reaches their port.
{{- end }}
docs/kubernetes.md shows the first pod.
";

/// The manifests for `values` in one form.
///
/// # Errors
/// When a value is wrong, or two contradict each other.
pub fn render(values: &ClusterValues, form: ManifestForm) -> Result<Vec<RenderedFile>, Fault> {
    check_values(values)?;
    let source = FieldSource { values, chart: form == ManifestForm::Helm };
    let objects: Vec<ManifestObject> =
        [cluster::objects(source), volumes::objects(source), devices::objects(source)].concat();
    Ok(match form {
        ManifestForm::Yaml => {
            let mut text = FIRST_LINE.to_owned();
            for object in kept(&objects, source) {
                let _ = write!(text, "---\n{}", print(&object.object));
            }
            vec![RenderedFile { path: "spurline.yaml".into(), text }]
        }
        ManifestForm::Kustomize => kustomize_files(&objects, source),
        ManifestForm::Helm => chart_files(&objects, values),
    })
}

fn kept<'a>(objects: &'a [ManifestObject], source: FieldSource<'a>) -> impl Iterator<Item = &'a ManifestObject> + 'a {
    objects.iter().filter(move |object| object.conditions.iter().all(|one| source.holds(*one)))
}

/// The files of objects, in their order.
fn file_names(objects: &[ManifestObject]) -> Vec<&'static str> {
    let mut names: Vec<&'static str> = Vec::new();
    for object in objects {
        if !names.contains(&object.file) {
            names.push(object.file);
        }
    }
    names
}

fn kustomize_files(objects: &[ManifestObject], source: FieldSource<'_>) -> Vec<RenderedFile> {
    let mut files = Vec::new();
    let mut resources = Vec::new();
    for name in file_names(objects) {
        let of_file: Vec<_> = kept(objects, source).filter(|object| object.file == name).collect();
        if of_file.is_empty() {
            continue;
        }
        let mut text = FIRST_LINE.to_owned();
        for object in of_file {
            let _ = write!(text, "---\n{}", print(&object.object));
        }
        resources.push(json!(format!("{name}.yaml")));
        files.push(RenderedFile { path: format!("{name}.yaml"), text });
    }
    let kustomization = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": resources,
    });
    files.insert(
        0,
        RenderedFile { path: "kustomization.yaml".into(), text: format!("{FIRST_LINE}{}", print(&kustomization)) },
    );
    files
}

fn chart_files(objects: &[ManifestObject], values: &ClusterValues) -> Vec<RenderedFile> {
    let version = env!("CARGO_PKG_VERSION");
    let chart = json!({
        "apiVersion": "v2",
        "name": "spurline",
        "description": "A distributed cache file system: cache nodes, volumes for pods, RDMA devices for pods",
        "type": "application",
        "version": version,
        "appVersion": version,
        "kubeVersion": ">=1.26.0-0",
    });
    // A person's values become the chart's defaults; without any, the file with its comments is.
    let defaults = match ClusterValues::defaults() {
        Ok(defaults) if defaults == *values => DEFAULT_VALUES.to_owned(),
        _ => print(values.tree()),
    };
    let file = |path: &str, text: String| RenderedFile { path: path.to_owned(), text };
    let mut files = vec![
        file("Chart.yaml", format!("{FIRST_LINE}{}", print(&chart))),
        file("values.yaml", defaults),
        file("values.schema.json", schema_text(values)),
        file("templates/NOTES.txt", CHART_NOTES.to_owned()),
    ];
    for name in file_names(objects) {
        let mut text = FIRST_LINE.to_owned();
        // Helm makes the release's namespace.
        for object in objects.iter().filter(|object| object.file == name && object.object["kind"] != "Namespace") {
            let body = print(&object.object);
            match object.conditions.as_slice() {
                [] => {
                    let _ = write!(text, "---\n{body}");
                }
                conditions => {
                    let _ = write!(text, "{{{{- if {} }}}}\n---\n{body}{{{{- end }}}}\n", all_of(conditions));
                }
            }
        }
        files.push(file(&format!("templates/{name}.yaml"), text));
    }
    files.retain(|file| file.text != FIRST_LINE);
    files
}
