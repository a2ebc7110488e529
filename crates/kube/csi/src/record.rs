//! The record of a volume on this node, in a file that outlives the driver. Knows no process and no mount.

use crate::launcher::PodReference;
use crate::settings::VolumeSettings;
use serde::{Deserialize, Serialize};
use spurline_config::Fault;
use spurline_sys::replace_file;
use std::fs;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

/// The record's file in the volume's directory.
const RECORD_FILE: &str = "volume.json";

/// A directory of a pod to which a volume is bound.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PublishedTarget {
    /// The directory.
    pub path: PathBuf,
    /// The pod; `None` where the caller names none.
    pub pod: Option<PodReference>,
    /// Whether the pod may only read a volume that is written elsewhere.
    #[serde(default)]
    pub read_only: bool,
}

/// A volume of this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VolumeRecord {
    /// The volume's id.
    pub volume_id: String,
    /// The settings of the mount.
    pub settings: VolumeSettings,
    /// The staging directory, while the volume is staged.
    pub staged: Option<PathBuf>,
    /// The directories of pods.
    pub targets: Vec<PublishedTarget>,
    /// The name of the mount process.
    pub process: Option<String>,
    /// The processes started so far.
    pub launches: u32,
    /// Why the last process ended, if any.
    pub last_end: Option<String>,
    /// Whether the mount outlives its process.
    #[serde(default)]
    pub recovers: bool,
}

impl VolumeRecord {
    /// A volume that nothing uses yet.
    pub(crate) fn new(volume_id: &str, settings: VolumeSettings) -> Self {
        VolumeRecord {
            volume_id: volume_id.to_owned(),
            settings,
            staged: None,
            targets: Vec::new(),
            process: None,
            launches: 0,
            last_end: None,
            recovers: false,
        }
    }

    /// Whether the volume is staged or published.
    pub(crate) fn is_used(&self) -> bool {
        self.staged.is_some() || !self.targets.is_empty()
    }

    /// The pods that use the volume.
    pub(crate) fn pods(&self) -> Vec<PodReference> {
        self.targets.iter().filter_map(|target| target.pod.clone()).collect()
    }

    /// Writes the record to the volume's directory, as a whole or not at all.
    ///
    /// # Errors
    /// When the directory is not writable.
    pub(crate) fn save(&self, dir: &Path) -> Result<(), Fault> {
        let file = dir.join(RECORD_FILE);
        let text = serde_json::to_vec_pretty(self).unwrap_or_default();
        let written = make_private_dir(dir).and_then(|()| replace_file(&file, &text, 0o600));
        written.map_err(|e| {
            Fault::failed(format!("the volume's record {}: {e}", file.display()), "make --state-dir writable")
        })
    }

    /// Reads the record of a volume's directory; `None` when the directory has none.
    ///
    /// # Errors
    /// When the file can't be read or parsed.
    pub(crate) fn load(dir: &Path) -> Result<Option<VolumeRecord>, Fault> {
        let file = dir.join(RECORD_FILE);
        match fs::read(&file) {
            Ok(text) => serde_json::from_slice(&text).map(Some).map_err(|e| record_error(&file, &e)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(record_error(&file, &e)),
        }
    }
}

fn record_error(file: &Path, why: &dyn std::fmt::Display) -> Fault {
    Fault::failed(format!("the record {}: {why}", file.display()), "")
}

/// Makes a directory that only its owner may enter, and the directories above.
pub(crate) fn make_private_dir(dir: &Path) -> std::io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_survives_its_writer() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("volume");
        let settings = VolumeSettings { source: "s3://b".into(), ..VolumeSettings::default() };
        let mut record = VolumeRecord::new("pv-1", settings);
        assert!(!record.is_used());
        let pod = PodReference { name: "p".into(), namespace: "n".into(), uid: "u".into() };
        record.targets.push(PublishedTarget { path: "/t".into(), pod: Some(pod.clone()), read_only: true });
        record.save(&at).unwrap();
        record.process = Some("7:8".into());
        record.save(&at).unwrap();
        let read = VolumeRecord::load(&at).unwrap().unwrap();
        assert_eq!((read.pods(), read.is_used(), &read), (vec![pod], true, &record));
        assert_eq!(VolumeRecord::load(dir.path()).unwrap(), None);
        fs::write(at.join(RECORD_FILE), b"{").unwrap();
        assert!(VolumeRecord::load(&at).unwrap_err().what.contains("volume.json"));
    }
}
