//! The forms of the manifests: one text, a Kustomize base, a Helm chart.

use crate::context::{FieldSource, all_of};
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

/// The first line of every file.
const NOTE: &str = "# Made by 'spurline k8s render'; change the values, not this file.\n";
/// What a person has to know after an installation.
const CHART_NOTES: &str = "Spurline is installed in the namespace {{ .Release.Namespace }}.\n\
    Nodes and volumes need the secret {{ .Values.groupSecret }}:\n\
    \x20 kubectl -n {{ .Release.Namespace }} create secret generic {{ .Values.groupSecret }} \
    --from-literal=group-token=\"$(openssl rand -base64 32)\"\n\
    docs/kubernetes.md shows the first pod.\n";

/// The manifests for `values` in one form.
///
/// # Errors
/// When the values contradict each other.
pub fn render(values: &ClusterValues, form: ManifestForm) -> Result<Vec<RenderedFile>, Fault> {
    check_values(values)?;
    let source = FieldSource { values, chart: form == ManifestForm::Helm };
    let objects: Vec<ManifestObject> =
        [cluster::objects(source), volumes::objects(source), devices::objects(source)].concat();
    Ok(match form {
        ManifestForm::Yaml => {
            let mut text = NOTE.to_owned();
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
        let mut text = NOTE.to_owned();
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
        RenderedFile { path: "kustomization.yaml".into(), text: format!("{NOTE}{}", print(&kustomization)) },
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
        file("Chart.yaml", format!("{NOTE}{}", print(&chart))),
        file("values.yaml", defaults),
        file("templates/NOTES.txt", CHART_NOTES.to_owned()),
    ];
    for name in file_names(objects) {
        let mut text = NOTE.to_owned();
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
    files.retain(|file| file.text != NOTE);
    files
}

/// Checks values that contradict each other.
fn check_values(values: &ClusterValues) -> Result<(), Fault> {
    let text = |path: &str| values.find(path).and_then(|value| value.as_str()).unwrap_or_default();
    let on = |path: &str| values.find(path).is_some_and(|value| value == true);
    let kind = text("nodes.kind");
    if !["DaemonSet", "StatefulSet"].contains(&kind) {
        return Err(Fault::usage(format!("nodes.kind is '{kind}'"), "write DaemonSet or StatefulSet"));
    }
    let network = text("networkAttachment.type");
    if !["macvlan", "ipvlan", "ipoib"].contains(&network) {
        return Err(Fault::usage(format!("networkAttachment.type is '{network}'"), "write macvlan, ipvlan or ipoib"));
    }
    if !text("devicePlugin.memlock").is_empty() && !on("devicePlugin.useCdi") {
        return Err(Fault::usage(
            "devicePlugin.memlock is set and devicePlugin.useCdi is false",
            "set devicePlugin.useCdi to true: the limit is raised by a hook of CDI",
        ));
    }
    if on("nodes.enabled") && !on("coordinator.enabled") && text("registry").is_empty() {
        return Err(Fault::usage(
            "nodes.enabled is true and there is no registry: coordinator.enabled is false and registry is empty",
            "set coordinator.enabled to true, or registry to etcd://HOST:2379",
        ));
    }
    if values.find("nodes.sources").and_then(|list| list.as_array()).is_none_or(Vec::is_empty) && on("nodes.enabled") {
        return Err(Fault::usage(
            "nodes.sources is empty",
            "list the buckets that nodes may read, such as s3://datasets",
        ));
    }
    Ok(())
}
