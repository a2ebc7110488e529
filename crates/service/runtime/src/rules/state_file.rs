//! The last known rules of a node's group, in a file in each cache directory: the blocks on these disks have classes that the
//! rules name, and a node may be started while the registry is gone. Does not know the meaning of rules.

use serde::{Deserialize, Serialize};
use spurline_config::GroupConfig;
use spurline_rules::RuleSet;
use spurline_sys::replace_file;
use spurline_types::{Error, ErrorKind};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Beside the settings.
const RULES_FILE: &str = "rules.json";

/// The content of a file.
#[derive(Serialize, Deserialize)]
struct StoredRules {
    group: String,
    registry: String,
    rules: RuleSet,
}

/// A directory.
struct RuleFile {
    file: PathBuf,
    /// The content of the file.
    has: RuleSet,
    /// Whether the failure of a write was logged.
    said: bool,
}

/// The files, of a group by a registry: the rules of another mean nothing here.
pub struct RuleFiles {
    group: String,
    registry: String,
    places: Vec<RuleFile>,
}

impl RuleFiles {
    /// Reads the files of the directories.
    pub fn open(dirs: &[PathBuf], group: &GroupConfig) -> RuleFiles {
        let mut kept =
            RuleFiles { group: group.name.clone(), registry: group.registry.to_string(), places: Vec::new() };
        for dir in dirs {
            let file = dir.join(RULES_FILE);
            let has = kept.read_file(&file).unwrap_or_else(|error| {
                tracing::warn!("{}: {error}; the rules of the group are not known from there", file.display());
                RuleSet::default()
            });
            kept.places.push(RuleFile { file, has, said: false });
        }
        kept
    }

    fn read_file(&self, file: &Path) -> Result<RuleSet, Error> {
        let text = match fs::read(file) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(RuleSet::default()),
            Err(error) => return Err(Error::io("it can't be read", &error)),
        };
        let stored: StoredRules = serde_json::from_slice(&text)
            .map_err(|error| Error::new(ErrorKind::Invalid, format!("malformed: {error}")))?;
        if stored.group != self.group || stored.registry != self.registry {
            tracing::info!("{} belongs to another group or registry and is ignored", file.display());
            return Ok(RuleSet::default());
        }
        Ok(stored.rules)
    }

    /// The rules that are kept, of all directories together.
    pub fn merged_rules(&self) -> RuleSet {
        self.places.iter().fold(RuleSet::default(), |all, place| all.or_newer(place.has.clone()))
    }

    /// Keeps these, where others are kept.
    pub fn store_rules(&mut self, set: &RuleSet) {
        for place in self.places.iter_mut().filter(|place| place.has != *set) {
            let (group, registry) = (self.group.clone(), self.registry.clone());
            let stored = serde_json::to_vec(&StoredRules { group, registry, rules: set.clone() });
            match stored.map_err(io::Error::from).and_then(|text| replace_file(&place.file, &text, 0o600)) {
                Ok(()) => {
                    place.has = set.clone();
                    place.said = false;
                }
                Err(error) => {
                    if !place.said {
                        // A disk that is full or bad still serves blocks.
                        tracing::warn!("{}: the rules of the group are not kept: {error}", place.file.display());
                    }
                    place.said = true;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_rules::FolderRule;
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::Duration;

    #[test]
    fn what_was_known_last_is_known_again_in_the_same_group_only() {
        let root = tempfile::tempdir().unwrap();
        let dirs = [root.path().join("one"), root.path().join("two")];
        dirs.iter().for_each(|dir| fs::create_dir(dir).unwrap());
        let group = |name: &str, registry: &str| GroupConfig {
            name: name.to_owned(),
            registry: registry.parse().unwrap(),
            zone: String::new(),
            hold: Duration::ZERO,
        };
        let own = group("g", "coordinator:a:1");
        let mut kept = RuleFiles::open(&dirs, &own);
        assert_eq!(kept.merged_rules(), RuleSet::default());
        kept.store_rules(&RuleSet::default());
        assert!(!dirs[0].join(RULES_FILE).exists(), "there is no rule");
        let rule = FolderRule { url: "s3://b/x".into(), pin: true, ..FolderRule::default() };
        let set = RuleSet { revision: 3, rules: vec![rule] };
        kept.store_rules(&set);
        assert_eq!((kept.merged_rules(), RuleFiles::open(&dirs, &own).merged_rules()), (set.clone(), set.clone()));
        for dir in &dirs {
            assert_eq!(fs::metadata(dir.join(RULES_FILE)).unwrap().permissions().mode() & 0o777, 0o600);
            assert_eq!(fs::read_dir(dir).unwrap().count(), 1);
        }
        for other in [group("h", "coordinator:a:1"), group("g", "coordinator:b:1")] {
            assert_eq!(RuleFiles::open(&dirs, &other).merged_rules(), RuleSet::default());
        }
        // One that was spoilt is none, and is made good.
        fs::write(dirs[0].join(RULES_FILE), "{\"group\":\"g").unwrap();
        assert_eq!(RuleFiles::open(&dirs[..1], &own).merged_rules(), RuleSet::default());
        let mut kept = RuleFiles::open(&dirs, &own);
        assert_eq!(kept.merged_rules(), set);
        kept.store_rules(&set);
        assert_eq!(RuleFiles::open(&dirs[..1], &own).merged_rules(), set);
    }
}
