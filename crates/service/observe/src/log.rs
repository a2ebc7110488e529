//! Logging: destination, format, and a limit for repeated warnings.

use lossy_writer::LossyWriter;
use parking_lot::Mutex;
use spurline_types::{Error, ErrorKind, Result};
use std::collections::HashMap;
use std::fmt;
use std::fs::OpenOptions;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::{Context, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer};

mod lossy_writer;

/// Warnings and errors written per code location and window; more are counted.
const WINDOW_LINES: u32 = 20;
/// Length of the window.
const LOG_WINDOW: Duration = Duration::from_secs(10);

/// The library behind the S3 endpoint logs each refused request as an error; only a filter that names the library shows these.
const QUIET_LIBRARY: &str = "s3s=off";

/// Log settings.
#[derive(Debug, Clone, Default)]
pub struct LogSettings {
    /// The file to append to; `None` for standard error.
    pub file: Option<PathBuf>,
    /// The filter; `None` for RUST_LOG, or `info`.
    pub filter: Option<String>,
    /// A JSON object per line.
    pub json: bool,
    /// The service of this process, such as the mountpoint: named in each line of a file, which several processes may share.
    pub service: String,
    /// Also shows warnings and errors to the user, until [`end_start`]: of what goes to a file only.
    pub during_start: Option<fn(&str)>,
}

/// Whether the service has started.
static STARTED: AtomicBool = AtomicBool::new(false);

/// The start has ended: from now on warnings and errors go to the log only.
pub fn end_start() {
    STARTED.store(true, Ordering::Relaxed);
}

/// Shows the warnings and errors of a start to the user.
struct StartWarnings(fn(&str));

impl<S: Subscriber> Layer<S> for StartWarnings {
    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        if *event.metadata().level() > Level::WARN || STARTED.load(Ordering::Relaxed) {
            return;
        }
        let mut text = EventText::default();
        event.record(&mut text);
        (self.0)(&text.0);
    }
}

/// The message of an event, and the other fields behind.
#[derive(Default)]
struct EventText(String);

impl Visit for EventText {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "message" => self.0.insert_str(0, &format!("{value:?}")),
            name => self.0.push_str(&format!(" {name}={value:?}")),
        }
    }
}

/// Starts logging for the whole process, once.
///
/// # Errors
/// When the filter does not parse, the file cannot be opened, or logging was started before.
pub fn init_logging(settings: &LogSettings) -> Result<()> {
    let filter = settings.filter.clone().or_else(|| std::env::var("RUST_LOG").ok().filter(|f| !f.is_empty()));
    let text = filter.unwrap_or_else(|| "info".into());
    let filter = EnvFilter::try_new(&text).map_err(|e| {
        let text = format!("log filter '{text}': {e}");
        Error::new(ErrorKind::Invalid, text)
    })?;
    let filter = match QUIET_LIBRARY.parse() {
        Ok(quiet) if !text.contains("s3s") => filter.add_directive(quiet),
        _ => filter,
    };
    let file = match &settings.file {
        None => None,
        Some(path) => Some(
            OpenOptions::new()
                .append(true)
                .create(true)
                .open(path)
                .map_err(|e| Error::io(format_args!("log file {}", path.display()), &e))?,
        ),
    };
    // Colour on a terminal only, and not with NO_COLOR.
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
    let ansi = file.is_none() && std::io::stderr().is_terminal() && !no_color;
    // A line that cannot be written (terminal closed, disk full) is lost. A report of that on standard error could
    // panic in the thread that logs, because standard error may be what failed.
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(ansi).log_internal_errors(false);
    macro_rules! finish {
        ($builder:expr, $format:expr) => {{
            let builder = $builder.event_format(LimitedFormat::new($format));
            match file {
                Some(file) => {
                    let start = settings.during_start.map(StartWarnings);
                    builder
                        .with_writer(std::sync::Mutex::new(file))
                        .finish()
                        .with(start)
                        .try_init()
                        .map_err(|_| started_before())
                }
                None => builder
                    .with_writer(std::sync::Mutex::new(LossyWriter::new(std::io::stderr())))
                    .try_init()
                    .map_err(|_| started_before()),
            }
        }};
    }
    let format = tracing_subscriber::fmt::format();
    let process = if file.is_some() { Some(ProcessLabel::of_this(&settings.service)) } else { None };
    if settings.json {
        finish!(builder.json(), LabelledJson { inner: format.json(), process })
    } else {
        finish!(builder, format.with_target(true).with_timer(LineStamp { process }))
    }
}

fn started_before() -> Error {
    Error::new(ErrorKind::Invalid, "logging was started before")
}

/// What distinguishes the lines of this process in a file that several processes share.
struct ProcessLabel {
    id: u32,
    service: String,
}

impl ProcessLabel {
    fn of_this(service: &str) -> Self {
        ProcessLabel { id: std::process::id(), service: service.to_owned() }
    }
}

/// The time and the label of the process.
struct LineStamp {
    process: Option<ProcessLabel>,
}

impl FormatTime for LineStamp {
    fn format_time(&self, out: &mut Writer<'_>) -> fmt::Result {
        SystemTime.format_time(out)?;
        match &self.process {
            None => Ok(()),
            Some(ProcessLabel { id, service }) if service.is_empty() => write!(out, " [{id}]"),
            // A mountpoint may contain line breaks.
            Some(ProcessLabel { id, service }) => write!(out, " [{id} {}]", service.escape_debug()),
        }
    }
}

/// Objects that begin with the label of the process.
struct LabelledJson<F> {
    inner: F,
    process: Option<ProcessLabel>,
}

impl<S, N, F> FormatEvent<S, N> for LabelledJson<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let Some(ProcessLabel { id, service }) = &self.process else {
            return self.inner.format_event(context, out, event);
        };
        let mut line = String::new();
        self.inner.format_event(context, Writer::new(&mut line), event)?;
        let fields = line.strip_prefix('{').ok_or(fmt::Error)?;
        let service = serde_json::Value::from(service.as_str());
        write!(out, "{{\"pid\":{id},\"service\":{service},{fields}")
    }
}

/// Lines written per code location within the window.
struct SiteCounts<K>(Mutex<HashMap<K, SiteCount>>);

struct SiteCount {
    since: Instant,
    count: u32,
}

impl<K: std::hash::Hash + Eq> SiteCounts<K> {
    /// `None` to suppress the line, else how many were suppressed before.
    fn admit_line(&self, place: K, now: Instant) -> Option<u32> {
        let mut places = self.0.lock();
        let entry = places.entry(place).or_insert(SiteCount { since: now, count: 0 });
        let mut left_out = 0;
        if now.duration_since(entry.since) >= LOG_WINDOW {
            left_out = entry.count.saturating_sub(WINDOW_LINES);
            *entry = SiteCount { since: now, count: 0 };
        }
        entry.count = entry.count.saturating_add(1);
        (entry.count <= WINDOW_LINES).then_some(left_out)
    }
}

/// A format that writes a warning or an error at most [`WINDOW_LINES`] times in a [`LOG_WINDOW`] per code location. The first
/// line of the next window reports how many were left out.
struct LimitedFormat<F> {
    inner: F,
    // As many entries as the code has warnings.
    places: SiteCounts<Identifier>,
}

impl<F> LimitedFormat<F> {
    fn new(inner: F) -> Self {
        LimitedFormat { inner, places: SiteCounts(Mutex::default()) }
    }
}

impl<S, N, F> FormatEvent<S, N> for LimitedFormat<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        if *event.metadata().level() > Level::WARN {
            return self.inner.format_event(context, out, event);
        }
        match self.places.admit_line(event.metadata().callsite(), Instant::now()) {
            None => Ok(()),
            Some(left_out) => {
                if left_out > 0 {
                    // As a separate line, in the same format.
                    let seconds = LOG_WINDOW.as_secs();
                    tracing::info!(left_out, seconds, "lines like the next one were left out");
                }
                self.inner.format_event(context, out.by_ref(), event)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing_subscriber::util::SubscriberInitExt;

    #[derive(Clone, Default)]
    struct Sink(std::sync::Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_flood_is_cut_and_counted() {
        let sink = Sink::default();
        let writer = sink.clone();
        let format = LimitedFormat::new(tracing_subscriber::fmt::format());
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .event_format(format)
            .with_writer(move || writer.clone())
            .finish();
        let guard = subscriber.set_default();
        for n in 0..100 {
            tracing::warn!(n, "the disk is slow");
            tracing::info!(n, "news");
        }
        drop(guard);
        let text = String::from_utf8(sink.0.lock().clone()).unwrap();
        assert_eq!(text.matches("the disk is slow").count(), WINDOW_LINES as usize);
        assert_eq!(text.matches("news").count(), 100);
    }

    #[test]
    fn lines_of_a_shared_file_name_process_and_service() {
        let process = || Some(ProcessLabel { id: 7, service: "/mnt/a\nb".into() });
        let format = tracing_subscriber::fmt::format().with_ansi(false);
        let log = |as_json: bool| {
            let sink = Sink::default();
            let writer = sink.clone();
            let builder = tracing_subscriber::fmt().with_writer(move || writer.clone());
            let guard = if as_json {
                let format = LabelledJson { inner: format.clone().json(), process: process() };
                builder.json().event_format(LimitedFormat::new(format)).finish().set_default()
            } else {
                let format = format.clone().with_timer(LineStamp { process: process() });
                builder.event_format(LimitedFormat::new(format)).finish().set_default()
            };
            tracing::info!("hello");
            drop(guard);
            String::from_utf8(sink.0.lock().clone()).unwrap()
        };
        let text = log(false);
        assert!(text.contains(" [7 /mnt/a\\nb]") && text.lines().count() == 1, "{text}");
        let object: serde_json::Value = serde_json::from_str(&log(true)).unwrap();
        assert_eq!((&object["pid"], &object["service"]), (&7.into(), &"/mnt/a\nb".into()), "{object}");
        assert_eq!(object["fields"]["message"], "hello");
    }

    #[test]
    fn the_gap_is_told_in_the_next_window() {
        let places = SiteCounts(Mutex::default());
        let start = Instant::now();
        for n in 0..WINDOW_LINES + 5 {
            assert_eq!(places.admit_line("here", start).is_some(), n < WINDOW_LINES);
        }
        assert_eq!(places.admit_line("there", start), Some(0));
        assert_eq!(places.admit_line("here", start + LOG_WINDOW), Some(5));
        assert_eq!(places.admit_line("here", start + LOG_WINDOW), Some(0));
    }

    #[test]
    fn a_wrong_filter_is_refused() {
        let settings = LogSettings { filter: Some("a=b=c".into()), ..Default::default() };
        assert!(init_logging(&settings).unwrap_err().message().contains("a=b=c"));
    }
}
