//! A job looked at from here until it ends, also over a time in which nobody answers. It knows neither what the job is
//! about nor how it is done.

use super::show;
use crate::cli::JobArgs;
use serde_json::{Value, json};
use spurline_config::Fault;
use spurline_jobs::JobAction;
use spurline_runtime::jobs::place::{Place, has_ended, submission};
use spurline_types::{Error, Result};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often a job is asked how far it is.
const OFTEN: Duration = Duration::from_millis(200);
/// A coordinator that does not answer is asked again after this, then after twice as long each time, up to [`SELDOM`].
const SOON: Duration = Duration::from_millis(400);
const SELDOM: Duration = Duration::from_secs(5);
/// How long none may answer before the look ends: a coordinator that is restarted needs seconds, one that was moved to
/// another host a minute.
const SILENCE: Duration = Duration::from_secs(60);
/// Paths that are named in words to be typed again.
const PATHS: usize = 3;

/// What is looked at, and how.
pub struct Look<'a> {
    place: &'a Place,
    as_json: bool,
    /// The command that looks at it again, without its verb.
    words: Words,
    bar: show::Bar,
}

/// Words for a shell that mean the same job.
pub struct Words {
    command: String,
    rest: String,
}

impl Words {
    fn with(&self, flag: &str) -> String {
        format!("{} --{flag} {}", self.command, self.rest)
    }
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,=@%+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// The words by which the job of these paths is found again.
pub fn words(action: JobAction, paths: &[String], args: &JobArgs, place: &Place) -> Words {
    let mut rest: Vec<String> = match &args.files_from {
        Some(file) => vec!["--files-from".into(), quoted(&file.to_string_lossy())],
        None if paths.len() > PATHS => vec!["PATH...".into()],
        None => paths.iter().map(|path| quoted(path)).collect(),
    };
    if let (true, Some(registry)) = (place.is_group(), &args.registry) {
        rest.extend(["--source".into(), quoted(place.source()), "--registry".into(), quoted(&registry.to_string())]);
        if args.said.cache_group {
            rest.extend(["--cache-group".into(), quoted(&args.cache_group)]);
        }
        let trust = &args.trust;
        let files = [
            ("--group-token-file", &trust.group_token_file),
            ("--tls-cert", &trust.tls_cert),
            ("--tls-key", &trust.tls_key),
            ("--tls-ca", &trust.tls_ca),
        ];
        for (flag, file) in files {
            rest.extend(file.iter().flat_map(|file| [flag.into(), quoted(&file.to_string_lossy())]));
        }
        rest.extend(trust.tls.then(|| "--tls".to_owned()));
    }
    Words { command: format!("spurline {action}"), rest: rest.join(" ") }
}

/// Why a question was given up.
enum Lost {
    /// What was answered, or that who does the job is gone and the job with it.
    Told(Error),
    /// Nobody answered, for too long or until a person had enough of it.
    Silent(Error),
}

/// Asks again while nobody answers and `goes_on` says that the job does, up to `limit` and until `interrupted`; calls
/// `say` with the first such error, and with `None` when there is an answer again.
fn patiently(
    mut ask: impl FnMut() -> Result<Value>,
    goes_on: impl Fn(&Error) -> bool,
    limit: Duration,
    interrupted: &AtomicBool,
    say: impl Fn(Option<&Error>),
) -> std::result::Result<Value, Lost> {
    let (mut since, mut pause) = (None, SOON);
    loop {
        let error = match ask() {
            Ok(answer) => {
                if since.is_some() {
                    say(None);
                }
                return Ok(answer);
            }
            Err(error) if goes_on(&error) => error,
            Err(error) => return Err(Lost::Told(error)),
        };
        let began = *since.get_or_insert_with(|| {
            say(Some(&error));
            Instant::now()
        });
        let until = Instant::now() + pause;
        while Instant::now() < until {
            if began.elapsed() >= limit || interrupted.load(Ordering::Acquire) {
                return Err(Lost::Silent(error));
            }
            std::thread::sleep(OFTEN.min(pause));
        }
        pause = (pause * 2).min(SELDOM);
    }
}

impl<'a> Look<'a> {
    /// A look at a job that `place` does; `words` mean it.
    pub fn new(place: &'a Place, as_json: bool, words: Words) -> Self {
        Look { place, as_json, words, bar: show::Bar::new(as_json) }
    }

    /// Says which other jobs of these paths there are.
    pub fn others(&self, job: &Value) {
        let others: Vec<&str> = job["others"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        if !others.is_empty() {
            self.bar.say(&format!(
                "of these paths there are under way as well: {}; give the options that one was begun with to see it",
                others.join(", ")
            ));
        }
    }

    /// Asks how far the job `id` is, and keeps in `seen` which one of that name it is.
    fn ask(&self, id: &str, seen: &mut u64, interrupted: &AtomicBool) -> std::result::Result<Value, Fault> {
        let say = |error: Option<&Error>| {
            self.bar.say(&match error {
                Some(error) => format!(
                    "{} does not answer: {error}; {id} goes on when it is back, and is asked for until then",
                    self.place.who()
                ),
                None => format!("{} answers again", self.place.who()),
            });
        };
        let ask = || self.place.ask(&json!({"do": "progress", "id": id}), *seen);
        let answer = patiently(ask, |error| self.place.goes_on(error), SILENCE, interrupted, say);
        let answer = answer.map_err(|lost| match lost {
            Lost::Told(error) => self.place.fault(&error),
            Lost::Silent(error) => self.silent(id, &error),
        })?;
        *seen = (*seen).max(submission(&answer));
        Ok(answer)
    }

    /// What a look ends with when nobody answers.
    fn silent(&self, id: &str, error: &Error) -> Fault {
        Fault::missing(
            format!("{} does not answer: {error}; {id} goes on when it is back", self.place.who()),
            format!("look again: {}; or end it then: {}", self.words.with("progress"), self.words.with("stop")),
        )
    }

    /// Shows a job, of which `now` says how far it is, until it ends. A person who interrupts ends the job where it is
    /// `mine`, else only the look at it.
    ///
    /// # Errors
    /// When nobody answers for too long, or what is answered.
    pub fn watch(&mut self, now: &Value, interrupted: &AtomicBool, mine: bool) -> std::result::Result<ExitCode, Fault> {
        self.others(now);
        let (id, mut seen) = (id_of(now), submission(now));
        let mut told = false;
        loop {
            // Once it was told to stop, there is nothing more to be interrupted but the wait for a coordinator.
            let now = self.ask(&id, &mut seen, interrupted)?;
            if has_ended(&now) {
                self.bar.end();
                return Ok(show::report(&now, self.as_json));
            }
            self.bar.show(&now);
            if interrupted.load(Ordering::Acquire) && !told {
                if !mine {
                    self.bar.end();
                    anstream::eprintln!("{id} goes on; --stop ends it");
                    return Ok(ExitCode::SUCCESS);
                }
                told = true;
                let stop = json!({"do": "stop", "id": id});
                self.place.ask(&stop, seen).map_err(|error| match self.place.goes_on(&error) {
                    true => self.silent(&id, &error),
                    false => self.place.fault(&error),
                })?;
            }
            std::thread::sleep(OFTEN);
        }
    }

    /// Waits for the end of jobs that were stopped.
    ///
    /// # Errors
    /// As for [`Look::watch`].
    pub fn ended(&mut self, stopped: &Value) -> std::result::Result<ExitCode, Fault> {
        let others = stopped["others"].as_array().into_iter().flatten().filter_map(Value::as_str);
        let first = (id_of(stopped), submission(stopped));
        for (id, mut seen) in std::iter::once(first).chain(others.map(|id| (id.to_owned(), 0))) {
            loop {
                let now = self.ask(&id, &mut seen, &AtomicBool::default())?;
                if has_ended(&now) {
                    self.bar.end();
                    // Who stopped it has what was wanted, however it ended.
                    show::report(&now, self.as_json);
                    break;
                }
                self.bar.show(&now);
                std::thread::sleep(OFTEN);
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn id_of(job: &Value) -> String {
    job["id"].as_str().unwrap_or_default().to_owned()
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
            if tries < 3 { Err(away()) } else { Ok(json!(1)) }
        };
        let say = |error: Option<&Error>| said.borrow_mut().push(error.is_some());
        let answer = patiently(ask, |_| true, Duration::from_secs(600), &AtomicBool::default(), say);
        assert!(matches!(answer, Ok(answer) if answer == json!(1)));
        assert_eq!(*said.borrow(), [true, false]);
    }

    #[test]
    fn patience_ends_and_a_job_that_is_gone_is_not_waited_for() {
        let ask = || Err(away());
        let end = |goes_on: bool, limit: Duration, interrupted: bool| {
            patiently(ask, |_| goes_on, limit, &AtomicBool::new(interrupted), |_| {})
        };
        assert!(matches!(end(true, Duration::ZERO, false), Err(Lost::Silent(_))));
        assert!(matches!(end(true, Duration::from_secs(600), true), Err(Lost::Silent(_))));
        assert!(matches!(end(false, Duration::from_secs(600), false), Err(Lost::Told(_))));
    }

    #[test]
    fn words_to_type_again_are_quoted_where_a_shell_wants_it() {
        assert_eq!(quoted("s3://b/a-b_c.d"), "s3://b/a-b_c.d");
        assert_eq!(quoted("my data"), "'my data'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
    }
}
