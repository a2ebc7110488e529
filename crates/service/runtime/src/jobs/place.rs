//! Where a job is done: by the process of the mount that its paths lie in, or by a coordinator.

use crate::locator::{ANSWER, locate};
use serde_json::{Value, json};
use spurline_config::{Fault, HostPort, Registry, SourceUrl};
use spurline_jobs::JobState;
use spurline_observe::client::AdminPeer;
use spurline_observe::dial;
use spurline_trust::Trust;
use spurline_types::{Error, ErrorKind, Result, url};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Who does a job, and what it is about.
pub struct Place {
    who: Who,
    source: String,
}

enum Who {
    /// The process of a mount.
    Mount { peer: AdminPeer, mountpoint: PathBuf },
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
        source: &SourceUrl,
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
            let url = if whole { path.parse::<SourceUrl>().ok() } else { None };
            let text = url.as_ref().map_or(path.as_str(), SourceUrl::as_str).trim_end_matches('/');
            match url::path_below(text, &source) {
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
        let mut place: Option<(AdminPeer, PathBuf, String)> = None;
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

    fn find(path: &str, place: &mut Option<(AdminPeer, PathBuf, String)>) -> Result<(PathBuf, String, PathBuf), Fault> {
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

    /// Asks about a job that was seen with the number `since` as its submission, be it 0 for one that was not seen yet.
    ///
    /// # Errors
    /// When nobody answers, or what is answered; `Unavailable` as long as one that may know the job does not answer.
    pub fn ask(&self, request: &Value, since: u64) -> Result<Value> {
        match &self.who {
            Who::Mount { .. } => self.ask_one(0, request),
            Who::Coordinators { at, .. } => {
                // Paths alone mean all jobs of them, wherever they are worked on.
                at_work(at.len(), request["do"] == "stop", since, |number| self.ask_one(number, request))
            }
        }
    }

    /// Begins the job `id` by the request `submit`: with the coordinator that works on it already, or else with one that
    /// answers.
    ///
    /// # Errors
    /// As for [`Place::ask`].
    pub fn begin(&self, id: &str, submit: &Value) -> Result<Value> {
        match &self.who {
            Who::Coordinators { at, .. } if at.len() > 1 => {
                let progress = json!({"do": "progress", "id": id});
                begin(at.len(), |number, after| {
                    let Some(after) = after else { return self.ask_one(number, &progress) };
                    let mut submit = submit.clone();
                    submit["after"] = after.into();
                    self.ask_one(number, &submit)
                })
            }
            _ => self.ask(submit, 0),
        }
    }

    fn ask_one(&self, number: usize, request: &Value) -> Result<Value> {
        match &self.who {
            Who::Mount { peer, .. } => peer.send_job_request(request, ANSWER),
            Who::Coordinators { at, group, trust } => {
                spurline_membership::request_jobs(&at[number..=number], group, trust, request, ANSWER)
            }
        }
    }

    /// Whether a job goes on although nobody answered now: with a coordinator's next start, or by another coordinator.
    pub fn goes_on(&self, error: &Error) -> bool {
        is_silence(error) && self.is_group()
    }

    /// An error of [`Place::ask`] for people: what is not there to be asked is missing, a job that is not known is a failure.
    pub fn fault(&self, error: &Error) -> Fault {
        match &self.who {
            // It was unmounted, or killed.
            Who::Mount { peer: AdminPeer::Socket(socket, _), mountpoint }
                if dial::probe_socket(socket, None).is_err() =>
            {
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

/// What the first of so many coordinators says that works on a job; where none does, what one says that did it last. Behind
/// it no more are asked, unless `stop` is for all of them.
///
/// An end of before `since` is that of a job of the same name, and not of the one that was seen: coordinators that share no
/// store know of their own alone. To stop a job that was not seen, an end says nothing while another does not answer.
fn at_work(count: usize, stop: bool, since: u64, mut ask: impl FnMut(usize) -> Result<Value>) -> Result<Value> {
    let (mut working, mut ended, mut missing, mut silent) = (None, None::<Value>, None, None);
    for number in 0..count {
        match ask(number) {
            Ok(job) if !has_ended(&job) && !stop => return Ok(job),
            Ok(job) if !has_ended(&job) => working = working.or(Some(job)),
            Ok(job) if ended.as_ref().is_some_and(|last| submission(last) >= submission(&job)) => {}
            Ok(job) => ended = Some(job),
            Err(error) if error.kind() == ErrorKind::NotFound => missing = Some(error),
            Err(error) if is_silence(&error) => silent = Some(error),
            Err(error) => return Err(error),
        }
    }
    let counts = |last: &Value| match (stop, since) {
        (true, 0) => silent.is_none(),
        (true, _) => silent.is_none() || submission(last) >= since,
        (false, _) => submission(last) >= since,
    };
    let none = || Error::new(ErrorKind::Unavailable, "no coordinator knows of it");
    working.or(ended.filter(counts)).ok_or_else(|| silent.or(missing).unwrap_or_else(none))
}

/// Whether nobody answered, in contrast to an answer that is an error.
fn is_silence(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout)
}

/// Which of the jobs of its paths a job is; a later one has more.
pub fn submission(job: &Value) -> u64 {
    job["submission"].as_u64().unwrap_or(0)
}

/// Begins a job, so that of coordinators that share no store no two do it: all are asked for it before, also when one
/// did not answer whether it began. `ask` asks a coordinator how far the job is, or to begin it as a later one than
/// that with the number given: an end of before is told by it.
fn begin(count: usize, mut ask: impl FnMut(usize, Option<u64>) -> Result<Value>) -> Result<Value> {
    let (mut tried, mut after) = (Vec::new(), 0);
    loop {
        let (mut free, mut silent) = (None, None);
        for number in 0..count {
            let answer = ask(number, None);
            after = answer.as_ref().map_or(after, |job| submission(job).max(after));
            match answer {
                Ok(job) if !has_ended(&job) => return ask(number, Some(after)),
                Err(error) if is_silence(&error) => silent = Some(error),
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ if tried.contains(&number) => {}
                _ => free = free.or(Some(number)),
            }
        }
        let Some(number) = free else {
            return Err(silent.unwrap_or_else(|| Error::new(ErrorKind::Unavailable, "no coordinator begins the job")));
        };
        match ask(number, Some(after)) {
            Err(error) if is_silence(&error) => tried.push(number),
            begun => return begun,
        }
    }
}

/// Whether a path has no part that means another one.
fn simple(path: &str) -> bool {
    !path.split('/').skip(1).any(|part| matches!(part, "" | "." | ".."))
}

/// Whether a job has ended.
pub fn has_ended(job: &Value) -> bool {
    serde_json::from_value(job["state"].clone()).is_ok_and(JobState::is_ended)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    fn no_job() -> Result<Value> {
        Err(Error::new(ErrorKind::NotFound, "there is no job"))
    }

    fn away() -> Result<Value> {
        Err(Error::new(ErrorKind::Unavailable, "connection refused"))
    }

    fn state(state: &str) -> Result<Value> {
        Ok(json!({"state": state}))
    }

    #[test]
    fn whoever_works_on_a_job_is_heard_before_who_did_or_knows_of_none() {
        let said = |answers: [fn() -> Result<Value>; 3]| {
            at_work(3, false, 0, |number| answers[number]())
                .map(|job| job["state"].as_str().unwrap_or_default().to_owned())
        };
        let (running, done): (fn() -> _, fn() -> _) = (|| state("RUNNING"), || state("SUCCEEDED"));
        assert_eq!(said([no_job, done, running]).unwrap(), "RUNNING");
        assert_eq!(said([away, no_job, done]).unwrap(), "SUCCEEDED");
        assert_eq!(said([no_job, away, no_job]).unwrap_err().kind(), ErrorKind::Unavailable);
        assert_eq!(said([no_job; 3]).unwrap_err().kind(), ErrorKind::NotFound);
        let mut asked = 0;
        let stopped = at_work(3, true, 0, |number| {
            asked += 1;
            if number == 1 { running() } else { done() }
        });
        assert_eq!((stopped.unwrap()["state"].as_str(), asked), (Some("RUNNING"), 3));
    }

    #[test]
    fn an_end_of_before_is_not_that_of_the_job_that_was_seen() {
        fn done(submission: u64) -> Result<Value> {
            Ok(json!({"state": "SUCCEEDED", "submission": submission}))
        }
        let said = |stop: bool, since: u64, answers: [fn() -> Result<Value>; 2]| {
            at_work(2, stop, since, |number| answers[number]())
                .map(|job| submission(&job))
                .map_err(|error| error.kind())
        };
        let (old, new): (fn() -> _, fn() -> _) = (|| done(7), || done(8));
        // Who works on it is away for a moment, and another did it yesterday.
        assert_eq!(said(false, 8, [away, old]), Err(ErrorKind::Unavailable));
        assert_eq!(said(false, 8, [away, new]), Ok(8));
        assert_eq!(said(false, 8, [old, new]), Ok(8));
        assert_eq!(said(false, 0, [away, old]), Ok(7), "nothing else is known of it");
        // It was lost with its coordinator.
        assert_eq!(said(false, 8, [no_job, old]), Err(ErrorKind::NotFound));
        // Nothing was stopped as long as the one that may work on it has not heard of that.
        assert_eq!(said(true, 0, [away, new]), Err(ErrorKind::Unavailable));
        assert_eq!(said(true, 8, [away, old]), Err(ErrorKind::Unavailable));
        assert_eq!(said(true, 8, [away, new]), Ok(8));
        assert_eq!(said(true, 0, [no_job, new]), Ok(8));
    }

    #[test]
    fn a_job_begins_with_one_coordinator() {
        // The second has it.
        let begun = RefCell::new(Vec::new());
        let two = |number: usize, begins: Option<u64>| match (number, begins) {
            (_, Some(_)) => {
                begun.borrow_mut().push(number);
                state("RUNNING")
            }
            (1, _) => state("RUNNING"),
            _ => no_job(),
        };
        begin(3, two).unwrap();
        assert_eq!(*begun.borrow(), [1]);
        // The first is away; the second begins it, and its answer is lost.
        begun.borrow_mut().clear();
        let lost = |number: usize, begins: Option<u64>| match (number, begins) {
            (0, _) => away(),
            (1, Some(_)) if begun.borrow().is_empty() => {
                begun.borrow_mut().push(1);
                away()
            }
            (1, Some(_)) => state("RUNNING"),
            (1, None) if !begun.borrow().is_empty() => state("WAITING"),
            (_, Some(_)) => panic!("it is begun twice"),
            _ => no_job(),
        };
        begin(3, lost).unwrap();
        // One that can't begin it is gone past, and none is an error.
        let broken = |number: usize, begins: Option<u64>| match (number, begins) {
            (2, Some(_)) => state("RUNNING"),
            (_, Some(_)) => away(),
            _ => no_job(),
        };
        begin(3, broken).unwrap();
        // The second did it before, as its third: this one is later.
        let again = |number: usize, begins: Option<u64>| match (number, begins) {
            (0, Some(after)) => Ok(json!({"state": "RUNNING", "submission": after + 1})),
            (1, None) => Ok(json!({"state": "SUCCEEDED", "submission": 3})),
            (_, Some(_)) => panic!("the first would do it"),
            _ => no_job(),
        };
        assert_eq!(submission(&begin(2, again).unwrap()), 4);
        assert_eq!(begin(2, |_, _| away()).unwrap_err().kind(), ErrorKind::Unavailable);
    }
}
