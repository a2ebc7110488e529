//! The files of the chart, as in `deploy/helm/spurline`, and the objects that the templates make. Knows no object's fields.

use crate::template::{TemplateInput, render_template};
use crate::values::ClusterValues;
use crate::yaml::print;
use serde_json::{Value, json};
use spurline_config::Fault;

/// A file of the chart, by path in the chart.
macro_rules! chart_file {
    ($path:literal) => {
        ($path, include_str!(concat!("../../../../deploy/helm/spurline/", $path)))
    };
}

/// The values, with defaults and meanings.
pub const DEFAULT_VALUES: &str = include_str!("../../../../deploy/helm/spurline/values.yaml");
/// The description of the chart, and what a person has to know after an installation.
pub(crate) const CHART_TEXTS: [(&str, &str); 2] = [chart_file!("Chart.yaml"), chart_file!("templates/NOTES.txt")];
/// The templates, in the order of application.
pub(crate) const CHART_TEMPLATES: [(&str, &str); 10] = [
    chart_file!("templates/coordinator.yaml"),
    chart_file!("templates/nodes.yaml"),
    chart_file!("templates/network-policy.yaml"),
    chart_file!("templates/pod-monitor.yaml"),
    chart_file!("templates/csi-mount-pod.yaml"),
    chart_file!("templates/csi.yaml"),
    chart_file!("templates/csi-controller.yaml"),
    chart_file!("templates/device-plugin.yaml"),
    chart_file!("templates/network-attachment.yaml"),
    chart_file!("templates/test.yaml"),
];

/// The objects of a file, by the file's name.
#[derive(Debug, Clone)]
pub(crate) struct FileObjects {
    /// Such as `nodes.yaml`.
    pub file: &'static str,
    /// Never empty.
    pub objects: Vec<Value>,
}

/// The namespace, which Helm makes itself, and the objects that the templates make of `values`; files without objects are left
/// out.
///
/// # Errors
/// When a template has an error, which a test of all templates finds.
pub(crate) fn cluster_objects(values: &ClusterValues) -> Result<Vec<FileObjects>, Fault> {
    let namespace = json!({
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": values.text("namespace"),
            // Mount pods and the driver mount file systems, which restricted namespaces forbid.
            "labels": { "pod-security.kubernetes.io/enforce": "privileged" },
        },
    });
    let mut files = vec![FileObjects { file: "namespace.yaml", objects: vec![namespace] }];
    let data = json!({
        "Values": values.tree(),
        "Release": { "Namespace": values.text("namespace") },
        "Template": { "BasePath": "templates" },
    });
    let input = TemplateInput { data: &data, templates: &CHART_TEMPLATES };
    for (path, template) in CHART_TEMPLATES {
        let broken = |why: String| {
            Fault::failed(format!("the chart's {path}: {why}"), "report it: the chart is part of the program")
        };
        let text = render_template(template, input).map_err(broken)?;
        let objects = read_objects(&text).map_err(broken)?;
        if !objects.is_empty() {
            files.push(FileObjects { file: path.trim_start_matches("templates/"), objects });
        }
    }
    Ok(files)
}

fn read_objects(text: &str) -> Result<Vec<Value>, String> {
    let mut objects: Vec<Value> = serde_saphyr::from_multiple(text).map_err(|e| e.to_string())?;
    objects.retain(|object| !object.is_null());
    for object in &mut objects {
        fill_empty_lists(object);
        // YAML within an object is printed like the object itself.
        for (name, file) in object.get_mut("data").and_then(Value::as_object_mut).into_iter().flatten() {
            if let (true, Some(text)) = (name.ends_with(".yaml"), file.as_str()) {
                let document: Value = serde_saphyr::from_str(text).map_err(|e| e.to_string())?;
                *file = Value::String(print(&document));
            }
        }
    }
    Ok(objects)
}

/// A list whose items are all under conditions that do not hold is read as null.
fn fill_empty_lists(value: &mut Value) {
    match value {
        Value::Null => *value = Value::Array(Vec::new()),
        Value::Object(keys) => keys.values_mut().for_each(fill_empty_lists),
        Value::Array(items) => items.iter_mut().for_each(fill_empty_lists),
        _ => {}
    }
}
