//! Watches a job until the end, also while the worker does not answer for some time. Knows neither the purpose of the job nor the
//! work.

use super::show;
use crate::cli::JobArgs;
use spurline_config::Fault;
use spurline_jobs::{JobAction, JobReport, JobRequest};
use spurline_runtime::jobs::worker::JobWorker;
use spurline_sys::Backoff;
use spurline_types::{Error, Result};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Interval of progress queries.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// Pauses before a query is repeated.
const QUERY_PAUSES: Backoff = Backoff::new(Duration::from_millis(400), Duration::from_secs(5));
/// Watching ends after this long without an answer: the restart of a coordinator takes seconds, the move to another host a
/// minute.
const WATCH_SILENCE_LIMIT: Duration = Duration::from_secs(60);
/// Paths repeated in a suggested command.
const SUGGESTED_PATHS: usize = 3;

/// A job and the way of display.
pub struct JobWatch<'a> {
    place: &'a JobWorker,
    as_json: bool,
    /// The command that watches the job again.
    words: JobWords,
    bar: show::JobBar,
}

/// A shell command for the same job.
pub struct JobWords {
    command: String,
    rest: String,
}

impl JobWords {
    fn with_flag(&self, flag: &str) -> String {
        format!("{} --{flag} {}", self.command, self.rest)
    }
}

/// A word quoted for a shell.
fn shell_quoted(word: &str) -> String {
    if !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || "-_./:,=@%+".contains(c)) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// The command that finds the job on these paths again.
pub fn job_words(action: JobAction, paths: &[String], args: &JobArgs, place: &JobWorker) -> JobWords {
    let mut rest: Vec<String> = match &args.files_from {
        Some(file) => vec!["--files-from".into(), shell_quoted(&file.to_string_lossy())],
        None if paths.len() > SUGGESTED_PATHS => vec!["PATH...".into()],
        None => paths.iter().map(|path| shell_quoted(path)).collect(),
    };
    if let (true, Some(registry)) = (place.is_group(), &args.registry) {
        rest.extend([
            "--source".into(),
            shell_quoted(place.source()),
            "--registry".into(),
            shell_quoted(&registry.to_string()),
        ]);
        if args.said.cache_group {
            rest.extend(["--cache-group".into(), shell_quoted(&args.cache_group)]);
        }
        let trust = &args.trust;
        let files = [
            ("--group-token-file", &trust.group_token_file),
            ("--tls-cert", &trust.tls_cert),
            ("--tls-key", &trust.tls_key),
            ("--tls-ca", &trust.tls_ca),
        ];
        for (flag, file) in files {
            rest.extend(file.iter().flat_map(|file| [flag.into(), shell_quoted(&file.to_string_lossy())]));
        }
        rest.extend(trust.tls.then(|| "--tls".to_owned()));
    }
    JobWords { command: format!("spurline {action}"), rest: rest.join(" ") }
}

/// Why a query failed.
enum RequestFailure {
    /// The worker answered with an error, or is gone, and so is the job.
    Told(Error),
    /// No answer, for too long or until the user interrupted.
    Silent(Error),
}

/// Repeats a query while there is no answer and `goes_on` says that the job continues, up to `limit` and until
/// `interrupted`; calls `say` with the first such error, and with `None` when there is an answer again.
fn request_with_retry<T>(
    mut ask: impl FnMut() -> Result<T>,
    goes_on: impl Fn(&Error) -> bool,
    limit: Duration,
    interrupted: &AtomicBool,
    say: impl Fn(Option<&Error>),
) -> std::result::Result<T, RequestFailure> {
    let mut since = None;
    let mut pauses = QUERY_PAUSES;
    loop {
        let error = match ask() {
            Ok(answer) => {
                if since.is_some() {
                    say(None);
                }
                return Ok(answer);
            }
            Err(error) if goes_on(&error) => error,
            Err(error) => return Err(RequestFailure::Told(error)),
        };
        let began = *since.get_or_insert_with(|| {
            say(Some(&error));
            Instant::now()
        });
        let pause = pauses.next_pause();
        let until = Instant::now() + pause;
        while Instant::now() < until {
            if began.elapsed() >= limit || interrupted.load(Ordering::Acquire) {
                return Err(RequestFailure::Silent(error));
            }
            std::thread::sleep(PROGRESS_INTERVAL.min(pause));
        }
    }
}

impl<'a> JobWatch<'a> {
    /// Watches a job of `place`, which `words` find again.
    pub fn new(place: &'a JobWorker, as_json: bool, words: JobWords) -> Self {
        JobWatch { place, as_json, words, bar: show::JobBar::new(as_json) }
    }

    /// Lists the other jobs on these paths.
    pub fn print_others(&self, job: &JobReport) {
        let others = job.others.as_deref().unwrap_or_default();
        if !others.is_empty() {
            self.bar.say(&format!(
                "of these paths there are under way as well: {}; give the options that one was begun with to see it",
                others.join(", ")
            ));
        }
    }

    /// Queries the progress of the job `id`; `seen` is the job's submission.
    fn query_job(&self, id: &str, seen: &mut u64, interrupted: &AtomicBool) -> std::result::Result<JobReport, Fault> {
        let answer = request_with_retry(
            || self.place.send_request(&JobRequest::Progress { id: id.to_owned() }, *seen),
            |error| self.place.continues_after(error),
            WATCH_SILENCE_LIMIT,
            interrupted,
            |error| {
                self.bar.say(&match error {
                    Some(error) => format!(
                        "{} does not answer: {error}; {id} goes on when it is back, and is asked for until then",
                        self.place.who()
                    ),
                    None => format!("{} answers again", self.place.who()),
                });
            },
        );
        let answer = answer.map_err(|lost| match lost {
            RequestFailure::Told(error) => self.place.fault_of(&error),
            RequestFailure::Silent(error) => self.silence_fault(id, &error),
        })?;
        *seen = (*seen).max(answer.progress.submission);
        Ok(answer)
    }

    /// The error after too long without an answer.
    fn silence_fault(&self, id: &str, error: &Error) -> Fault {
        Fault::missing(
            format!("{} does not answer: {error}; {id} goes on when it is back", self.place.who()),
            format!(
                "look again: {}; or end it then: {}",
                self.words.with_flag("progress"),
                self.words.with_flag("stop")
            ),
        )
    }

    /// Shows a job, from the progress `now` on, until the end. Ctrl-C stops a job that is `mine`, else only the watching.
    ///
    /// # Errors
    /// When there is no answer for too long, or the answer is an error.
    pub fn watch_job(
        &mut self,
        now: &JobReport,
        interrupted: &AtomicBool,
        mine: bool,
    ) -> std::result::Result<ExitCode, Fault> {
        self.print_others(now);
        let id = now.id.clone();
        let mut seen = now.progress.submission;
        let mut told = false;
        loop {
            // Once a stop was requested, another interrupt only ends the wait for a coordinator.
            let now = self.query_job(&id, &mut seen, interrupted)?;
            if now.progress.state.is_ended() {
                self.bar.end();
                return Ok(show::print_report(&now, self.as_json));
            }
            self.bar.show(&now);
            if interrupted.load(Ordering::Acquire) && !told {
                if !mine {
                    self.bar.end();
                    anstream::eprintln!("{id} goes on; --stop ends it");
                    return Ok(ExitCode::SUCCESS);
                }
                told = true;
                let stop = JobRequest::Stop { id: id.clone() };
                self.place.send_request(&stop, seen).map_err(|error| {
                    if self.place.continues_after(&error) {
                        self.silence_fault(&id, &error)
                    } else {
                        self.place.fault_of(&error)
                    }
                })?;
            }
            std::thread::sleep(PROGRESS_INTERVAL);
        }
    }

    /// Waits for the end of jobs that were stopped.
    ///
    /// # Errors
    /// As for [`JobWatch::watch_job`].
    pub fn print_end(&mut self, stopped: &JobReport) -> std::result::Result<ExitCode, Fault> {
        let others = stopped.others.iter().flatten();
        let first = (stopped.id.clone(), stopped.progress.submission);
        for (id, mut seen) in std::iter::once(first).chain(others.map(|id| (id.clone(), 0))) {
            loop {
                let now = self.query_job(&id, &mut seen, &AtomicBool::default())?;
                if now.progress.state.is_ended() {
                    self.bar.end();
                    // The stop succeeded, however the job ended.
                    show::print_report(&now, self.as_json);
                    break;
                }
                self.bar.show(&now);
                std::thread::sleep(PROGRESS_INTERVAL);
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_types::ErrorKind;
    use std::cell::RefCell;

    fn away() -> Error {
        Error::new(ErrorKind::Unavailable, "connection refused")
    }

    #[test]
    fn a_coordinator_that_is_back_is_told_of_once_each_way() {
        let (said, mut tries) = (RefCell::new(Vec::new()), 0);
        let ask = || {
            tries += 1;
            if tries < 3 { Err(away()) } else { Ok(1) }
        };
        let say = |error: Option<&Error>| said.borrow_mut().push(error.is_some());
        let answer = request_with_retry(ask, |_| true, Duration::from_secs(600), &AtomicBool::default(), say);
        assert!(matches!(answer, Ok(1)));
        assert_eq!(*said.borrow(), [true, false]);
    }

    #[test]
    fn patience_ends_and_a_job_that_is_gone_is_not_waited_for() {
        let ask = || Err::<(), _>(away());
        let end = |goes_on: bool, limit: Duration, interrupted: bool| {
            request_with_retry(ask, |_| goes_on, limit, &AtomicBool::new(interrupted), |_| {})
        };
        assert!(matches!(end(true, Duration::ZERO, false), Err(RequestFailure::Silent(_))));
        assert!(matches!(end(true, Duration::from_secs(600), true), Err(RequestFailure::Silent(_))));
        assert!(matches!(end(false, Duration::from_secs(600), false), Err(RequestFailure::Told(_))));
    }

    #[test]
    fn words_to_type_again_are_quoted_where_a_shell_wants_it() {
        assert_eq!(shell_quoted("s3://b/a-b_c.d"), "s3://b/a-b_c.d");
        assert_eq!(shell_quoted("my data"), "'my data'");
        assert_eq!(shell_quoted("it's"), r"'it'\''s'");
    }
}
