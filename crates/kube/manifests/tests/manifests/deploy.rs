//! The chart in `deploy/helm` makes the same objects with Helm as with the program, and the other files in `deploy/` are made
//! of it.

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

/// The annotation of the driver that changes with the template of mount pods.
const CHECKSUM: &str = "checksum/mount-pod";

/// The objects of a text, by kind and name. Files within objects are compared by their content.
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

/// The line with the checksum of the template of mount pods.
fn template_checksum(text: &str) -> String {
    text.lines().find(|line| line.contains(CHECKSUM)).unwrap().trim().to_owned()
}

/// The driver is restarted when the template of mount pods changes, and only then.
fn check_template_checksums(rendered: impl Fn(&str) -> String) {
    let [other, same, again] = ["csi.memory=1Gi", "nodes.port=7001", "nodes.port=7002"].map(rendered);
    let [other, same, again] = [&other, &same, &again].map(|text| template_checksum(text));
    assert!(other != same && same == again, "{other} {same} {again}");
}

#[test]
fn the_driver_follows_the_template_of_mount_pods() {
    check_template_checksums(|setting| {
        let values = ClusterValues::defaults().unwrap().with_setting(setting).unwrap();
        render(&values, ManifestForm::Yaml).unwrap().swap_remove(0).text
    });
}

/// Run by `make test-all` only.
mod test_all {
    use super::*;

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
            "imagePullSecrets={registry-keys}",
            "nodes.kind=StatefulSet",
            "nodes.priorityClassName=system-node-critical",
            "nodes.hostNetwork=false",
            "csi.hostNetwork=false",
            "storageClass.secret=bucket-keys",
            "podMonitor.labels.release=prometheus",
            "nodes.rdmaNetwork=ib0:ib1",
            "nodes.rdmaResource=rdma/ib",
            "nodes.credentialsSecret=keys",
            "nodes.endpointUrl=http://minio:9000",
            "nodes.writable=true",
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
        let own_devices = ["nodes.rdmaNetwork=ib0", "csi.hostNetwork=false"];
        for settings in [&[][..], &others[..others.len() - 1], &others, &["registry=etcd://e:2379"], &own_devices] {
            // A helm from the Go module proxy assumes an old Kubernetes.
            let mut words = vec!["template", "spurline", chart, "--namespace", "spurline", "--kube-version", "1.30.0"];
            settings.iter().for_each(|setting| words.extend(["--set", setting]));
            let text = output_of("helm", &words).unwrap();
            // A list of --set is {a,b} to Helm, and YAML here.
            let set = |values: ClusterValues, setting: &&str| {
                values.with_setting(&setting.replace(['{'], "[").replace('}', "]")).unwrap()
            };
            let values = settings.iter().fold(ClusterValues::defaults().unwrap(), set);
            let mut wanted = plain(&values);
            // Helm makes the namespace of a release.
            wanted.retain(|_, object| object["kind"] != "Namespace");
            assert_eq!(objects(&text), wanted, "{settings:?}");
        }
    }

    /// Values that helm itself refuses, by the chart's schema.
    #[test]
    fn helm_refuses_wrong_values() {
        let chart = deploy("helm/spurline");
        let helm = |setting: &str| {
            let programs = spurline_testkit::go_program("kubernetes", "kubernetes")?;
            let words = ["template", "spurline", chart.to_str().unwrap(), "--kube-version", "1.30.0", "--set", setting];
            Some(Command::new(programs.join("helm")).args(words).output().unwrap())
        };
        for (setting, says) in [
            ("nodes.prot=1", "prot"),
            ("foo=1", "foo"),
            ("nodes.kind=Deployment", "nodes/kind"),
            ("networkAttachment.type=bridge", "networkAttachment/type"),
            ("nodes.port=99999", "nodes/port"),
            ("nodes.sources=s3://b", "nodes/sources"),
            ("nodes.nodeSelector.disk=1", "nodes/nodeSelector/disk"),
            ("global.shared=1", ""),
            ("enabled=true", ""),
            ("enabled=1", "enabled"),
            ("nodes.replicas=0", ""),
            ("networkAttachment.subnet=10.0.0.1-10.0.0.100/24", ""),
        ] {
            let Some(out) = helm(setting) else { return };
            let said = String::from_utf8_lossy(&out.stderr).replace('.', "/");
            assert_eq!(out.status.success(), says.is_empty(), "{setting}: {said}");
            assert!(said.contains(says), "{setting}: {said}");
        }
    }

    #[test]
    fn the_driver_follows_the_template_of_mount_pods_by_helm() {
        let chart = deploy("helm/spurline");
        let words = ["template", "spurline", chart.to_str().unwrap(), "--kube-version", "1.30.0", "--set"];
        if output_of("helm", &[&words[..], &["csi.memory=1Gi"]].concat()).is_none() {
            return;
        }
        check_template_checksums(|setting| output_of("helm", &[&words[..], &[setting]].concat()).unwrap());
    }
}
