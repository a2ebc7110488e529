//! `spurline load` and `spurline free`: work on many files, begun, looked at and stopped from here, done by a mount or by
//! a coordinator.

pub mod group;
mod place;
mod shared;
pub mod show;
pub mod target;

use crate::cli::{FreeArgs, JobArgs, LoadArgs};
use crate::{parts, rules, signals};
use place::Place;
use serde_json::{Value, json};
use spurline_config::Fault;
use spurline_config::checked::DEFAULT_GROUP;
use spurline_jobs::{Action, Spec, State};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How often a job is asked how far it is.
const LOOK: Duration = Duration::from_millis(200);

/// Runs `spurline load`.
///
/// # Errors
/// When the paths are in no mount, or its process refuses the job or does not answer.
pub fn load(args: LoadArgs) -> Result<ExitCode, Fault> {
    run(Action::Load, &args.path, &args.job, args.pin, |spec| Spec {
        metadata_only: args.metadata_only,
        verify: args.verify,
        skip_if_exists: args.skip_if_exists,
        replicas: args.replicas,
        ..spec
    })
}

/// Runs `spurline free`.
///
/// # Errors
/// As [`load`].
pub fn free(args: FreeArgs) -> Result<ExitCode, Fault> {
    run(Action::Free, &args.path, &args.job, false, |spec| spec)
}

fn run(
    action: Action,
    paths: &[String],
    args: &JobArgs,
    pin: bool,
    more: impl FnOnce(Spec) -> Spec,
) -> Result<ExitCode, Fault> {
    let listed = args.files_from.as_deref().map(place::listed).transpose()?;
    let paths = listed.as_deref().unwrap_or(paths);
    if paths.is_empty() {
        return Err(Fault::usage(
            format!("nothing to {action}"),
            format!("name files or folders: spurline {action} PATH, or a list of them with --files-from FILE"),
        ));
    }
    let (place, below) = match (&args.registry, &args.source) {
        (Some(registry), Some(source)) => {
            let trust = parts::open_trust(&args.trust.clone().check(false)?, &crate::group::hostname())?;
            Place::group(registry, args.cache_group.as_deref(), source, trust, paths)?
        }
        (Some(_), None) => {
            return Err(Fault::usage(
                "of which source are these files?",
                "give --source URL, the same that the mounts of the group mount",
            ));
        }
        (None, _) => Place::of(paths)?,
    };
    let spec = more(Spec {
        action,
        source: place.source().to_owned(),
        paths: below,
        listed: listed.is_some(),
        include: args.include.clone(),
        exclude: args.exclude.clone(),
        metadata_only: false,
        verify: false,
        skip_if_exists: false,
        replicas: None,
        rate: args.rate.map_or(0, |rate| rate.0),
        parallel: args.parallel,
    });
    spec.filter().map_err(|why| Fault::usage(why, "* is any part of a name, ** any folders, [ab] one of these"))?;
    let id = spec.id();
    if args.stop {
        place.ask(&json!({"do": "stop", "id": id}))?;
        return follow(&place, &id, args, &AtomicBool::default());
    }
    if args.progress {
        let now = place.ask(&json!({"do": "progress", "id": id}))?;
        if args.json || !show::is_terminal() {
            return Ok(show::report(&now, args.json));
        }
        let interrupted = signals::raised(1)?;
        return follow(&place, &id, args, &interrupted);
    }
    if pin && let Some(registry) = &args.registry {
        let group = args.cache_group.as_deref().unwrap_or(DEFAULT_GROUP);
        rules::pin_before_load(
            registry,
            group,
            &args.trust.clone().check(false)?,
            (place.source(), &spec.paths),
            args.json,
        )?;
    }
    // From before the job: a signal in between must not leave it running.
    let interrupted = if args.submit { Arc::default() } else { signals::raised(1)? };
    let begun = place.ask(&json!({"do": "submit", "spec": spec}))?;
    if args.submit {
        if args.json {
            anstream::println!("{begun}");
        } else {
            anstream::println!(
                "{id} is under way, done by {}; --progress in the place of --submit shows how far it is",
                place.who()
            );
        }
        return Ok(ExitCode::SUCCESS);
    }
    follow(&place, &id, args, &interrupted)
}

/// Shows a job until it ends. A person who interrupts ends the job, or only the look at it.
fn follow(place: &Place, id: &str, args: &JobArgs, interrupted: &AtomicBool) -> Result<ExitCode, Fault> {
    let bar = show::Bar::new(args.json);
    let mut told = false;
    loop {
        let now = place.ask(&json!({"do": "progress", "id": id}))?;
        if state(&now).is_some_and(State::ended) {
            bar.end();
            let code = show::report(&now, args.json);
            // Who stopped it has what was wanted.
            return Ok(if args.stop { ExitCode::SUCCESS } else { code });
        }
        bar.show(&now);
        if interrupted.load(Ordering::Acquire) && !told {
            if args.progress {
                bar.end();
                anstream::eprintln!("{id} goes on; --stop ends it");
                return Ok(ExitCode::SUCCESS);
            }
            told = true;
            place.ask(&json!({"do": "stop", "id": id}))?;
        }
        std::thread::sleep(LOOK);
    }
}

fn state(job: &Value) -> Option<State> {
    serde_json::from_value(job["state"].clone()).ok()
}
