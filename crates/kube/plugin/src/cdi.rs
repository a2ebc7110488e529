//! Files of the Container Device Interface: one for each resource, one device for each HCA. It knows neither kubelet nor
//! the runtime that reads them.

use crate::advertised::AdvertisedResource;
use serde_json::json;
use std::io;
use std::path::{Path, PathBuf};

/// The kind of a resource's devices, `spurline/rdma-ib`.
pub fn kind_of(resource: &str) -> String {
    format!("spurline/{}", resource.replace(['/', '.'], "-"))
}

/// The file of a resource.
pub fn file_of(dir: &Path, resource: &str) -> PathBuf {
    dir.join(format!("{}.json", kind_of(resource).replace('/', "-")))
}

/// Writes the file of a resource, or removes it when no HCA has a device node.
///
/// # Errors
/// When the directory or the file can't be written.
pub fn write_spec(dir: &Path, resource: &str, state: &AdvertisedResource) -> io::Result<()> {
    let node = |path: String| json!({"path": path.clone(), "hostPath": path, "permissions": "rw"});
    let devices: Vec<_> = state
        .hcas
        .iter()
        .filter(|hca| !hca.device_nodes.is_empty())
        .map(|hca| {
            let nodes: Vec<_> = state.device_paths(hca).into_iter().map(node).collect();
            json!({"name": hca.name, "containerEdits": {"deviceNodes": nodes}})
        })
        .collect();
    let file = file_of(dir, resource);
    if devices.is_empty() {
        return remove_spec(&file);
    }
    std::fs::create_dir_all(dir)?;
    let spec = json!({"cdiVersion": "0.5.0", "kind": kind_of(resource), "devices": devices});
    // A runtime reads every .json file of the directory at any time.
    let draft = file.with_extension("draft");
    std::fs::write(&draft, format!("{spec:#}\n"))?;
    std::fs::rename(&draft, &file)
}

/// Removes a file; a missing one is no error.
///
/// # Errors
/// When it can't be removed.
pub fn remove_spec(file: &Path) -> io::Result<()> {
    match std::fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
