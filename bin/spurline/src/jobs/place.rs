//! Where a job is done: by the process of the mount that its paths lie in.

use crate::target::{ANSWER, locate};
use serde_json::Value;
use spurline_config::Fault;
use spurline_observe::client::Peer;
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// A process that does jobs.
pub struct Place {
    peer: Peer,
    source: String,
    mountpoint: PathBuf,
}

impl Place {
    /// The place of `paths`, and the paths below its source.
    ///
    /// # Errors
    /// When a path is in no mount, or they are not all in one.
    pub fn of(paths: &[String]) -> Result<(Place, Vec<String>), Fault> {
        let mut place: Option<Place> = None;
        let mut all = Vec::with_capacity(paths.len());
        for path in paths {
            let (mountpoint, source, below) = match &place {
                // One look at the mount table serves all paths of a long list that lie below the same mountpoint.
                Some(known) if Path::new(path).is_absolute() && simple(path) => {
                    match Path::new(path).strip_prefix(&known.mountpoint) {
                        Ok(below) => (known.mountpoint.clone(), known.source.clone(), below.to_owned()),
                        Err(_) => Self::find(path, &mut place)?,
                    }
                }
                _ => Self::find(path, &mut place)?,
            };
            let known = place.as_ref().filter(|known| known.mountpoint == mountpoint && known.source == source);
            if known.is_none() {
                return Err(Fault::usage(
                    format!("{path} is in the mount at {}, other paths are not", mountpoint.display()),
                    "one job works on one mount: make a job for each",
                ));
            }
            let below = below.into_os_string().into_string().map_err(|below| {
                Fault::usage(format!("{}: a name that is no UTF-8", below.display()), "name the folder above it")
            })?;
            all.push(below);
        }
        let place = place.ok_or_else(|| Fault::usage("no path was named", ""))?;
        Ok((place, all))
    }

    fn find(path: &str, place: &mut Option<Place>) -> Result<(PathBuf, String, PathBuf), Fault> {
        use std::os::unix::ffi::OsStringExt as _;
        let (located, peer) = locate(Path::new(path))?;
        let below = PathBuf::from(std::ffi::OsString::from_vec(located.below));
        let (mountpoint, source) = (located.mount.mountpoint, located.mount.source);
        place.get_or_insert_with(|| Place { peer, source: source.clone(), mountpoint: mountpoint.clone() });
        Ok((mountpoint, source, below))
    }

    /// The source that the paths are below.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Asks about jobs.
    ///
    /// # Errors
    /// When nobody answers, or what is answered.
    pub fn ask(&self, request: &Value) -> Result<Value, Fault> {
        Ok(self.peer.jobs(request, ANSWER)?)
    }
}

/// Whether a path has no part that means another one.
fn simple(path: &str) -> bool {
    !path.split('/').skip(1).any(|part| matches!(part, "" | "." | ".."))
}

/// The paths of a list, one a line; `-` is standard input.
///
/// # Errors
/// When it can't be read, or has none.
pub fn listed(file: &Path) -> Result<Vec<String>, Fault> {
    let mut text = String::new();
    let read = if file == Path::new("-") {
        std::io::stdin().read_to_string(&mut text)
    } else {
        std::fs::File::open(file).and_then(|mut file| file.read_to_string(&mut text))
    };
    read.map_err(|e| {
        let what = format!("--files-from {}: {e}", file.display());
        if e.kind() == std::io::ErrorKind::InvalidData {
            Fault::usage(what, "a list has one path a line, in UTF-8")
        } else {
            Fault::missing(what, "name a readable file, or - for standard input")
        }
    })?;
    let paths: Vec<String> = text.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect();
    if paths.is_empty() {
        return Err(Fault::usage(format!("--files-from {}: no path is in it", file.display()), "one path a line"));
    }
    Ok(paths)
}
