//! Where a job is done: by the process of the mount that its paths lie in, or by a coordinator.

use crate::target::{ANSWER, locate};
use serde_json::Value;
use spurline_config::{Fault, HostPort, Registry, Source};
use spurline_observe::client::Peer;
use spurline_trust::Trust;
use spurline_types::{Error, ErrorKind, url};
use std::io::Read as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Who does a job, and what it is about.
pub struct Place {
    who: Who,
    source: String,
}

enum Who {
    /// The process of a mount.
    Mount { peer: Peer, mountpoint: PathBuf },
    /// The coordinators of a group.
    Coordinators { at: Vec<HostPort>, group: String, trust: Arc<Trust> },
}

impl Place {
    /// The coordinators of a group, and `paths` below `source`, be they whole URLs or not.
    ///
    /// # Errors
    /// When the registry is no coordinator, or a path is not below the source.
    pub fn group(
        registry: &Registry,
        group: &str,
        source: &Source,
        trust: Arc<Trust>,
        paths: &[String],
    ) -> Result<(Place, Vec<String>), Fault> {
        let Registry::Coordinator(at) = registry else {
            return Err(Fault::usage(
                format!("{registry} does no jobs: a coordinator does"),
                "give --registry coordinator://HOST:PORT, or a path in a mount of this machine, whose process does them",
            ));
        };
        let source = source.as_str().trim_end_matches('/').to_owned();
        let below = |path: &String| {
            // What could be a source of its own is written as one; the rest is below the one that was given.
            let whole = path.contains("://") || path.starts_with('/');
            let url = if whole { path.parse::<Source>().ok() } else { None };
            let text = url.as_ref().map_or(path.as_str(), Source::as_str).trim_end_matches('/');
            match url::below(text, &source) {
                Some(rest) => String::from_utf8(rest.into_owned())
                    .map_err(|_| Fault::usage(format!("{path}: a name that is no UTF-8"), "name the folder above it")),
                None if whole => Err(Fault::usage(
                    format!("{path} is not below --source {source}"),
                    "give the source that the mounts of the group mount",
                )),
                None => Ok(path.trim_matches('/').to_owned()),
            }
        };
        let below = paths.iter().map(below).collect::<Result<_, _>>()?;
        let who = Who::Coordinators { at: at.clone(), group: group.to_owned(), trust };
        Ok((Place { who, source }, below))
    }

    /// The mount of `paths`, and the paths below its source.
    ///
    /// # Errors
    /// When a path is in no mount, or they are not all in one.
    pub fn of(paths: &[String]) -> Result<(Place, Vec<String>), Fault> {
        let mut place: Option<(Peer, PathBuf, String)> = None;
        let mut all = Vec::with_capacity(paths.len());
        for path in paths {
            let (mountpoint, source, below) = match &place {
                // One look at the mount table serves all paths of a long list that lie below the same mountpoint.
                Some((_, mountpoint, source)) if Path::new(path).is_absolute() && simple(path) => {
                    match Path::new(path).strip_prefix(mountpoint) {
                        Ok(below) => (mountpoint.clone(), source.clone(), below.to_owned()),
                        Err(_) => Self::find(path, &mut place)?,
                    }
                }
                _ => Self::find(path, &mut place)?,
            };
            if place.as_ref().is_none_or(|known| known.1 != mountpoint || known.2 != source) {
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
        let (peer, mountpoint, source) = place.ok_or_else(|| Fault::usage("no path was named", ""))?;
        Ok((Place { who: Who::Mount { peer, mountpoint }, source }, all))
    }

    fn find(path: &str, place: &mut Option<(Peer, PathBuf, String)>) -> Result<(PathBuf, String, PathBuf), Fault> {
        use std::os::unix::ffi::OsStringExt as _;
        let (located, peer) = locate(Path::new(path))?;
        let below = PathBuf::from(std::ffi::OsString::from_vec(located.below));
        let (mountpoint, source) = (located.mount.mountpoint, located.mount.source);
        place.get_or_insert_with(|| (peer, mountpoint.clone(), source.clone()));
        Ok((mountpoint, source, below))
    }

    /// The source that the paths are below.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Who does the job, for people.
    pub fn who(&self) -> String {
        match &self.who {
            Who::Mount { mountpoint, .. } => format!("the mount at {}", mountpoint.display()),
            Who::Coordinators { group, .. } => format!("the coordinator of group {group}"),
        }
    }

    /// Whether the coordinators of a group do the job.
    pub fn is_group(&self) -> bool {
        matches!(self.who, Who::Coordinators { .. })
    }

    /// Asks about jobs.
    ///
    /// # Errors
    /// When nobody answers, or what is answered.
    pub fn ask(&self, request: &Value) -> spurline_types::Result<Value> {
        match &self.who {
            Who::Mount { peer, .. } => peer.jobs(request, ANSWER),
            Who::Coordinators { at, group, trust } => spurline_group::ask_jobs(at, group, trust, request, ANSWER),
        }
    }

    /// Whether a job goes on although nobody answered now: with a coordinator's next start, or by another coordinator.
    pub fn goes_on(&self, error: &Error) -> bool {
        let silent = matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout);
        silent && self.is_group()
    }

    /// An error of [`Place::ask`] for people: what is not there to be asked is missing, a job that is not known is a failure.
    pub fn fault(&self, error: &Error) -> Fault {
        match &self.who {
            // It was unmounted, or killed.
            Who::Mount { peer: Peer::Socket(socket), mountpoint } if UnixStream::connect(socket).is_err() => {
                Fault::missing(
                    format!("the mount at {} is gone, and its jobs with it: {error}", mountpoint.display()),
                    "mount it again and begin the job anew",
                )
            }
            _ if error.kind() == ErrorKind::NotFound => {
                Fault::failed(error.message(), "give the same paths as when it was begun, or begin it with --submit")
            }
            _ => error.clone().into(),
        }
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
