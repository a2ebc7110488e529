//! The files in `deploy/` are what `render` makes.

use serde_json::Value;
use spurline_manifests::{ClusterValues, ManifestForm, render};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

fn deploy(part: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(3).unwrap().join("deploy").join(part)
}

/// The files below a directory, by their paths in it.
fn files_below(dir: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().map(|entry| entry.unwrap().path()) {
        let name = entry.file_name().unwrap().to_str().unwrap().to_owned();
        if entry.is_dir() {
            found.extend(files_below(&entry).into_iter().map(|below| format!("{name}/{below}")));
        } else {
            found.insert(name);
        }
    }
    found
}

#[test]
fn the_checked_in_files_are_the_rendered_ones() {
    let values = ClusterValues::defaults().unwrap();
    let mut wrong = Vec::new();
    for (form, word, dir) in [
        (ManifestForm::Yaml, "yaml", "plain"),
        (ManifestForm::Kustomize, "kustomize", "kustomize/base"),
        (ManifestForm::Helm, "helm", "helm/spurline"),
    ] {
        let files = render(&values, form).unwrap();
        let same = files
            .iter()
            .all(|file| std::fs::read_to_string(deploy(dir).join(&file.path)).is_ok_and(|text| text == file.text));
        let names: BTreeSet<String> = files.iter().map(|file| file.path.clone()).collect();
        if !same || files_below(&deploy(dir)) != names {
            wrong.push(format!("rm -r deploy/{dir}; spurline k8s render --form {word} --out deploy/{dir}"));
        }
    }
    assert!(wrong.is_empty(), "deploy/ differs from what render makes:\n  {}", wrong.join("\n  "));
}

/// The objects of a text, by kind and name. Files within objects are compared by what they mean.
fn objects(text: &str) -> BTreeMap<String, Value> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(text).unwrap();
    let named = documents.into_iter().filter(|object| !object.is_null()).map(|mut object| {
        for file in object["data"].as_object_mut().into_iter().flat_map(|files| files.values_mut()) {
            *file = serde_saphyr::from_str(file.as_str().unwrap()).unwrap();
        }
        drop_empty(&mut object);
        (format!("{} {}", object["kind"], object["metadata"]["name"]), object)
    });
    named.collect()
}

/// A list whose items are all under conditions is empty in one form and nothing in the other: the same to a server.
fn drop_empty(value: &mut Value) {
    match value {
        Value::Object(keys) => {
            keys.values_mut().for_each(drop_empty);
            keys.retain(|_, value| !value.is_null() && value.as_array().is_none_or(|items| !items.is_empty()));
        }
        Value::Array(items) => items.iter_mut().for_each(drop_empty),
        _ => {}
    }
}

fn plain(values: &ClusterValues) -> BTreeMap<String, Value> {
    objects(&render(values, ManifestForm::Yaml).unwrap()[0].text)
}

/// A tool's output; `None` with a SKIP where the tools can't be built.
fn output_of(tool: &str, words: &[&str]) -> Option<String> {
    let programs = spurline_testkit::go_program("kubernetes", "kubernetes")?;
    let out = Command::new(programs.join(tool)).args(words).output().unwrap();
    assert!(out.status.success(), "{tool} {words:?}: {}", String::from_utf8_lossy(&out.stderr));
    Some(String::from_utf8(out.stdout).unwrap())
}

#[test]
fn kustomize_makes_the_same_objects() {
    let dir = deploy("kustomize/base");
    let Some(text) = output_of("kubectl", &["kustomize", dir.to_str().unwrap()]) else { return };
    assert_eq!(objects(&text), plain(&ClusterValues::defaults().unwrap()));
}

/// With the defaults, and with everything on that is off, and the other way round.
#[test]
fn helm_makes_the_same_objects() {
    let chart = deploy("helm/spurline");
    let chart = chart.to_str().unwrap();
    if output_of("helm", &["lint", "--strict", chart]).is_none() {
        return;
    }
    let others = [
        "nodes.kind=StatefulSet",
        "nodes.rdmaNetwork=ib0:ib1",
        "nodes.rdmaResource=rdma/ib",
        "nodes.credentialsSecret=keys",
        "nodes.endpointUrl=http://minio:9000",
        "coordinator.storage=1Gi",
        "devicePlugin.nfdLabel=true",
        "devicePlugin.useCdi=true",
        "devicePlugin.memlock=unlimited",
        "test.enabled=true",
        "networkAttachment.enabled=true",
        "networkAttachment.type=ipoib",
        "podMonitor.enabled=true",
        "networkPolicy.enabled=false",
        "groupSecret=",
    ];
    for settings in [&[][..], &others[..others.len() - 1], &others, &["registry=etcd://e:2379"]] {
        // A helm from the Go module proxy assumes an old Kubernetes.
        let mut words = vec!["template", "spurline", chart, "--namespace", "spurline", "--kube-version", "1.30.0"];
        settings.iter().for_each(|setting| words.extend(["--set", setting]));
        let text = output_of("helm", &words).unwrap();
        let values = settings.iter().fold(ClusterValues::defaults().unwrap(), |v, s| v.with_setting(s).unwrap());
        let mut wanted = plain(&values);
        // Helm makes the namespace of a release.
        wanted.retain(|_, object| object["kind"] != "Namespace");
        assert_eq!(objects(&text), wanted, "{settings:?}");
    }
}
