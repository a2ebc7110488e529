//! Files of the Container Device Interface: a file for each resource, a device for each HCA, with a hook that raises the limit of
//! locked memory where wanted. Knows neither kubelet nor the runtime that reads the files.

use crate::advertised::AdvertisedResource;
use serde_json::json;
use spurline_sys::replace_file;
use spurline_types::Size;
use std::io;
use std::path::{Path, PathBuf};

/// The vendor of all kinds of devices.
const CDI_VENDOR: &str = "spurline/";

/// The kind of a resource's devices, `spurline/rdma-ib`.
pub fn kind_of(resource: &str) -> String {
    format!("{CDI_VENDOR}{}", resource.replace(['/', '.'], "-"))
}

/// The file of a resource.
pub fn file_of(dir: &Path, resource: &str) -> PathBuf {
    dir.join(format!("{}.json", kind_of(resource).replace('/', "-")))
}

/// The limit of locked memory that containers with a device get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockedMemory {
    /// None.
    Unlimited,
    /// This many bytes.
    Bytes(u64),
}

impl std::str::FromStr for LockedMemory {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "unlimited" => Ok(LockedMemory::Unlimited),
            size => {
                Ok(LockedMemory::Bytes(size.parse::<Size>().map_err(|e| format!("{e}; or write unlimited"))?.bytes()))
            }
        }
    }
}

/// CDI has no edit for limits, so the hook runs the host's prlimit(1) on the container's first process, whose id the runtime
/// writes to the hook's standard input (OCI runtime specification, state). At `createRuntime` the process has no program yet, so
/// all started processes inherit the limit, whatever the user.
fn memlock_hook(limit: LockedMemory) -> serde_json::Value {
    let limit = match limit {
        LockedMemory::Unlimited => "unlimited".to_owned(),
        LockedMemory::Bytes(bytes) => bytes.to_string(),
    };
    // A quotation mark within another string of the state has a backslash before, so only the field matches.
    let pid = "\"$(sed -n 's/.*\"pid\" *: *\\([0-9][0-9]*\\).*/\\1/p')\"";
    json!({
        "hookName": "createRuntime",
        "path": "/bin/sh",
        "args": ["sh", "-c", format!("exec prlimit --memlock={limit}:{limit} --pid {pid}")],
        "env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"],
        "timeout": 10,
    })
}

/// Writes the file of a resource, or removes the file when no HCA has a device node.
///
/// # Errors
/// When the directory or the file can't be written.
pub fn write_spec(
    dir: &Path,
    resource: &str,
    state: &AdvertisedResource,
    memlock: Option<LockedMemory>,
) -> io::Result<()> {
    let devices: Vec<_> = state
        .hcas
        .iter()
        .filter(|hca| !hca.device_nodes.is_empty())
        .map(|hca| {
            let nodes: Vec<_> = state.device_paths(hca).into_iter().map(device_node_json).collect();
            json!({"name": hca.name, "containerEdits": {"deviceNodes": nodes}})
        })
        .collect();
    let file = file_of(dir, resource);
    if devices.is_empty() {
        return remove_spec(&file);
    }
    std::fs::create_dir_all(dir)?;
    let mut spec = json!({"cdiVersion": "0.5.0", "kind": kind_of(resource), "devices": devices});
    if let Some(limit) = memlock {
        // Edits of the whole file are made once for a container, whatever the number of devices.
        spec["containerEdits"] = json!({"hooks": [memlock_hook(limit)]});
    }
    // A runtime reads every .json file of the directory at any time.
    replace_file(&file, format!("{spec:#}\n").as_bytes(), 0o644)
}

fn device_node_json(path: String) -> serde_json::Value {
    json!({"path": path.clone(), "hostPath": path, "permissions": "rw"})
}

/// Removes this plugin's files of other resources than `resources`, of an earlier process, too; gives the files that could not be
/// removed.
pub fn remove_other_specs(dir: &Path, resources: &[String]) -> Vec<(PathBuf, io::Error)> {
    let kept: Vec<PathBuf> = resources.iter().map(|resource| file_of(dir, resource)).collect();
    let files = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let others = files.filter(|file| !kept.contains(file) && is_own_spec(file));
    others.filter_map(|file| remove_spec(&file).err().map(|error| (file, error))).collect()
}

/// Whether a file belongs to this plugin: by name, and by the kind inside.
fn is_own_spec(file: &Path) -> bool {
    let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if !name.starts_with("spurline-") || !name.ends_with(".json") {
        return false;
    }
    let spec = std::fs::read(file).ok().and_then(|text| serde_json::from_slice::<serde_json::Value>(&text).ok());
    spec.is_some_and(|spec| spec["kind"].as_str().is_some_and(|kind| kind.starts_with(CDI_VENDOR)))
}

/// Removes a file; a missing file is no error.
fn remove_spec(file: &Path) -> io::Result<()> {
    match std::fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_a_former_configuration_are_removed_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, kind: &str| {
            std::fs::write(dir.path().join(name), json!({"kind": kind}).to_string()).unwrap();
        };
        write("spurline-rdma-a.json", "spurline/rdma-a");
        write("spurline-rdma-b.json", "spurline/rdma-b");
        write("spurline-other.json", "example.com/other");
        write("nvidia.json", "nvidia.com/gpu");
        assert!(remove_other_specs(dir.path(), &["rdma/b".to_owned()]).is_empty());
        let names = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        assert_eq!(names, ["nvidia.json", "spurline-other.json", "spurline-rdma-b.json"]);
        assert!(remove_other_specs(&dir.path().join("missing"), &[]).is_empty());
    }

    #[test]
    fn a_limit_is_a_size_or_unlimited() {
        assert_eq!("unlimited".parse(), Ok(LockedMemory::Unlimited));
        assert_eq!("64M".parse(), Ok(LockedMemory::Bytes(64 << 20)));
        assert!("much".parse::<LockedMemory>().unwrap_err().contains("or write unlimited"));
    }
}
