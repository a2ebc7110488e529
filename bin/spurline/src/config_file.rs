//! The config file. Keys become defaults of the flags, so a single parser reads all three sources and the precedence holds. Knows
//! names and types of keys from the flags alone.

use crate::args::{OTHER_VARIABLES, env_name, is_switch};
use crate::{background, habits};
use clap::error::{ContextKind, ContextValue};
use clap::{Arg, ArgMatches, Command};
use spurline_config::values::nearest_word;
use spurline_observe::locate::RUNTIME_DIR_ENV;
use spurline_types::fault::Fault;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// The commands with a config file: at the top, or below `k8s`.
pub const SERVICE_COMMANDS: [&str; 6] = ["mount", "node", "gateway", "coordinator", "device-plugin", "csi-driver"];
/// The command with further services.
const SERVICE_GROUP: &str = "k8s";
/// The beginning of the variables of flags.
const VARIABLE_PREFIX: &str = "SPURLINE_";
/// Variables that stand for no flag: of the programs themselves, and a secret that has no place in a command line.
const VARIABLES_WITHOUT_FLAG: [&str; 5] = [
    RUNTIME_DIR_ENV,
    "SPURLINE_ETCD_PASSWORD",
    background::CHILD_VARIABLE,
    spurline_keeper::LIFE_VARIABLE,
    spurline_keeper::STORE_VARIABLE,
];
/// Beginnings of variables that others read: programs in pods with RDMA devices, the Python package, and the tests of this project.
const FOREIGN_VARIABLES: [&str; 2] = ["SPURLINE_HCAS_", "SPURLINE_TEST_"];
/// Flags without a key: the file cannot name itself.
const NO_KEY: [&str; 3] = ["config", "help", "version"];

/// Why a command line was refused.
#[derive(Debug)]
pub enum ArgsRefusal {
    /// clap's result: a wrong word, or help and version, which are no errors.
    Clap(Box<clap::Error>),
    /// An error of the config file or of an environment variable.
    Fault(Fault),
}

/// Parses a command line. Precedence: flag, environment, file, default.
///
/// # Errors
/// When a word, a variable or a key is wrong, or the file is missing; help and version return [`ArgsRefusal::Clap`].
pub fn parse_args(command: Command, words: Vec<OsString>) -> Result<ArgMatches, ArgsRefusal> {
    let mut command = command;
    if words
        .get(1)
        .and_then(|word| word.to_str())
        .is_some_and(|word| word == SERVICE_GROUP || SERVICE_COMMANDS.contains(&word))
    {
        check_variables(&command).map_err(ArgsRefusal::Fault)?;
    }
    if let Some((service, path)) = config_path(&command, &words) {
        let text = std::fs::read_to_string(&path).map_err(|e| {
            let what = format!("config file {}: {e}", path.display());
            ArgsRefusal::Fault(Fault::missing(what, "name a readable TOML file with --config or SPURLINE_CONFIG"))
        })?;
        command = with_file(command, &service, &path, &text).map_err(ArgsRefusal::Fault)?;
    }
    let copy = command.clone();
    command.try_get_matches_from(&words).map_err(|error| {
        match environment_fault(&copy, &words, &error).or_else(|| habits::explain_foreign_word(&copy, &words, &error)) {
            Some(fault) => ArgsRefusal::Fault(fault),
            None => ArgsRefusal::Clap(Box::new(error)),
        }
    })
}

/// Checks that every variable with the prefix of flags is one: a misspelt variable would have no effect.
fn check_variables(command: &Command) -> Result<(), Fault> {
    let services = SERVICE_COMMANDS.iter().filter_map(|service| find_service(command, service));
    let known: Vec<String> = services
        .flat_map(Command::get_arguments)
        .filter_map(|arg| arg.get_long().map(|long| (long, arg.get_all_aliases().unwrap_or_default())))
        .flat_map(|(long, aliases)| std::iter::once(long).chain(aliases).map(env_name).collect::<Vec<_>>())
        .chain(OTHER_VARIABLES.iter().map(|(_, name)| (*name).to_owned()))
        .collect();
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let unknown = names.filter(|name| {
        name.starts_with(VARIABLE_PREFIX)
            && !known.contains(name)
            && !VARIABLES_WITHOUT_FLAG.contains(&name.as_str())
            && !FOREIGN_VARIABLES.iter().any(|prefix| name.starts_with(prefix))
            && !is_service_link(name)
    });
    let Some(name) = unknown.min() else { return Ok(()) };
    let remedy = match nearest_word(&name, known.iter().map(String::as_str)) {
        Some(near) => format!("did you mean {near}?"),
        None => "unset it; the variables are SPURLINE_ and the long flags, see CONFIGURATION.md".to_owned(),
    };
    Err(Fault::usage(format!("unknown variable {name}"), remedy))
}

/// Whether Kubernetes sets such a variable for a service of the namespace, here one whose name begins with `spurline`.
fn is_service_link(name: &str) -> bool {
    name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || name.ends_with("_PORT")
            && std::env::var_os(name).is_some_and(|value| value.to_string_lossy().contains("://"))
        || ["_TCP", "_UDP", "_SCTP"].iter().any(|protocol| name.contains(protocol))
}

/// A service's command.
pub fn find_service<'a>(command: &'a Command, name: &str) -> Option<&'a Command> {
    command.find_subcommand(name).or_else(|| command.find_subcommand(SERVICE_GROUP)?.find_subcommand(name))
}

/// The command with a service's command changed.
pub fn change_service(command: Command, name: &str, change: impl FnOnce(Command) -> Command) -> Command {
    if command.find_subcommand(name).is_some() {
        return command.mut_subcommand(name, change);
    }
    if command.find_subcommand(SERVICE_GROUP).is_some_and(|group| group.find_subcommand(name).is_some()) {
        command.mut_subcommand(SERVICE_GROUP, |group| group.mut_subcommand(name, change))
    } else {
        command
    }
}

/// The command and the config file, from a first parse that ignores all other errors.
fn config_path(command: &Command, words: &[OsString]) -> Option<(String, PathBuf)> {
    fn ease(sub: Command) -> Command {
        let sub = sub.mut_args(|arg| {
            let keep = arg.get_id() == "config";
            let arg = arg.required(false);
            if keep { arg } else { arg.env(None::<&'static str>) }
        });
        if sub.get_name() == SERVICE_GROUP { sub.mut_subcommands(ease) } else { sub }
    }
    let lenient = command.clone().ignore_errors(true).mut_subcommands(ease);
    let matches = lenient.try_get_matches_from(words).ok()?;
    let (name, sub) = match matches.subcommand()? {
        (SERVICE_GROUP, group) => group.subcommand()?,
        other => other,
    };
    if !SERVICE_COMMANDS.contains(&name) {
        return None;
    }
    let path = sub.try_get_one::<PathBuf>("config").ok()??;
    Some((name.to_owned(), path.clone()))
}

/// The key of a flag.
fn key_of(arg: &Arg) -> Option<&str> {
    arg.get_long().filter(|long| !NO_KEY.contains(long))
}

/// Whether `key` is the key of a flag, or an earlier name of the flag.
fn is_key_of(arg: &Arg, key: &str) -> bool {
    key_of(arg).is_some_and(|own| own == key || arg.get_all_aliases().is_some_and(|aliases| aliases.contains(&key)))
}

fn has_key(command: &Command, service: &str, key: &str) -> bool {
    find_service(command, service).is_some_and(|sub| sub.get_arguments().any(|arg| is_key_of(arg, key)))
}

/// The command with the file's values as defaults of `service`'s flags.
///
/// # Errors
/// When the text is not TOML, a key is unknown or a value is wrong; the error names file and key.
pub fn with_file(command: Command, service: &str, path: &Path, text: &str) -> Result<Command, Fault> {
    let place = path.display();
    let table: Table = text.parse().map_err(|e: toml::de::Error| {
        Fault::usage(format!("config file {place} is not TOML: {}", e.to_string().trim_end()), "")
    })?;
    let mut chosen: Vec<(String, String, Value)> = Vec::new();
    for (key, value) in &table {
        match value {
            Value::Table(inner) if SERVICE_COMMANDS.contains(&key.as_str()) => {
                for (key2, value) in inner {
                    let named = format!("{key}.{key2}");
                    if !has_key(&command, key, key2) {
                        return Err(unknown_key(&command, path, &named, key2, &[key.as_str()]));
                    }
                    check_value(&command, key, key2, value, path, &named)?;
                    if key == service {
                        chosen.push((key2.clone(), named, value.clone()));
                    }
                }
            }
            _ => {
                let holds: Vec<&str> = SERVICE_COMMANDS.into_iter().filter(|s| has_key(&command, s, key)).collect();
                if holds.is_empty() {
                    return Err(unknown_key(&command, path, key, key, &SERVICE_COMMANDS));
                }
                for holder in &holds {
                    check_value(&command, holder, key, value, path, key)?;
                }
                if holds.contains(&service) {
                    // Inserted before the tables: a later entry of the same key takes precedence.
                    chosen.insert(0, (key.clone(), key.clone(), value.clone()));
                }
            }
        }
    }
    Ok(change_service(command, service, |sub| {
        sub.mut_args(|arg| match chosen.iter().rev().find(|(key, _, _)| is_key_of(&arg, key)) {
            None => arg,
            Some((_, _, value)) => {
                let values = words_of(value).unwrap_or_default();
                arg.required(false).default_values(values)
            }
        })
    }))
}

fn unknown_key(command: &Command, path: &Path, named: &str, key: &str, services: &[&str]) -> Fault {
    let known: Vec<String> = services
        .iter()
        .filter_map(|s| find_service(command, s))
        .flat_map(|sub| sub.get_arguments().filter_map(key_of).map(str::to_owned).collect::<Vec<_>>())
        .collect();
    let tables = SERVICE_COMMANDS.iter().copied().filter(|_| services.len() > 1);
    let near = nearest_word(key, known.iter().map(String::as_str).chain(tables));
    let remedy = match habits::remedy_of_foreign_key(key) {
        Some(remedy) => remedy,
        None if near.is_some() => format!("did you mean '{}'?", near.unwrap_or_default()),
        None => "the keys are the long flags without their dashes; see CONFIGURATION.md".to_owned(),
    };
    Fault::usage(format!("config file {} has the unknown key '{named}'", path.display()), remedy)
}

/// A value in the form of command-line words.
fn words_of(value: &Value) -> Option<Vec<String>> {
    match value {
        Value::String(s) => Some(vec![s.clone()]),
        Value::Integer(n) => Some(vec![n.to_string()]),
        Value::Float(n) => Some(vec![n.to_string()]),
        Value::Boolean(b) => Some(vec![b.to_string()]),
        Value::Array(items) => {
            let items: Option<Vec<Vec<String>>> = items.iter().map(words_of).collect();
            Some(items?.into_iter().flatten().collect())
        }
        Value::Datetime(_) | Value::Table(_) => None,
    }
}

/// Parses a single value, so that the error can name file and key.
fn check_value(
    command: &Command,
    service: &str,
    key: &str,
    value: &Value,
    path: &Path,
    named: &str,
) -> Result<(), Fault> {
    let wrong = |why: &str| Fault::usage(format!("config file {}, key '{named}': {why}", path.display()), "");
    let words = words_of(value).ok_or_else(|| wrong("a string, a number, true, false or a list of them is wanted"))?;
    let arg = find_service(command, service)
        .and_then(|sub| sub.get_arguments().find(|arg| is_key_of(arg, key)))
        .ok_or_else(|| wrong("unknown"))?;
    if words.len() != 1 && arg.get_value_delimiter().is_none() && !takes_many(arg) {
        return Err(wrong(&format!("one value is wanted and {} are given", words.len())));
    }
    words.iter().try_for_each(|word| check_word(arg, OsStr::new(word)).map_err(|why| wrong(&why)))
}

fn takes_many(arg: &Arg) -> bool {
    matches!(arg.get_action(), clap::ArgAction::Append)
}

/// Whether `word` is a valid value of the flag, by a command with this flag only.
fn check_word(arg: &Arg, word: &OsStr) -> Result<(), String> {
    let Some(long) = arg.get_long() else { return Ok(()) };
    if is_switch(arg) {
        let text = word.to_string_lossy().to_ascii_lowercase();
        let known = ["true", "false", "yes", "no", "on", "off", "1", "0", "y", "n", "t", "f"];
        return if known.contains(&text.as_str()) {
            Ok(())
        } else {
            Err(format!("'{text}' is neither true nor false"))
        };
    }
    let long = long.to_owned();
    let alone = arg.clone().env(None::<&'static str>).required(false).default_value(None::<&'static str>);
    let mut flag = OsString::from(format!("--{long}="));
    flag.push(word);
    let result =
        Command::new("check").disable_help_flag(true).arg(alone).try_get_matches_from([OsStr::new("check"), &flag]);
    match result {
        Ok(_) => Ok(()),
        Err(error) => {
            let why = clap_reason(&error);
            let word = word.to_string_lossy();
            Err(if why.contains(&*word) { why } else { format!("'{word}': {why}") })
        }
    }
}

/// The parser's own sentence from clap's error.
fn clap_reason(error: &clap::Error) -> String {
    if let Some(source) = std::error::Error::source(error) {
        return source.to_string();
    }
    let text = error.render().to_string();
    let first = text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned();
    let more: Vec<_> = text.lines().filter(|l| l.contains("possible values")).map(str::trim).collect();
    if more.is_empty() { first } else { format!("{first} {}", more.join(" ")) }
}

/// Whether a word of the command line is this flag.
fn gives_flag(arg: &Arg, word: &str) -> bool {
    let name = word.split_once('=').map_or(word, |(name, _)| name);
    let long = name.strip_prefix("--").is_some_and(|name| habits::long_names(arg).any(|long| long == name));
    let short = arg.get_short().is_some_and(|short| name.strip_prefix('-').is_some_and(|name| name.starts_with(short)));
    long || short
}

/// If clap refused the value of an environment variable, and not that of the flag beside it, an error that names the variable.
fn environment_fault(command: &Command, words: &[OsString], error: &clap::Error) -> Option<Fault> {
    use clap::error::ErrorKind as Kind;
    if !matches!(error.kind(), Kind::ValueValidation | Kind::InvalidValue) {
        return None;
    }
    let Some(ContextValue::String(refused)) = error.get(ContextKind::InvalidValue) else { return None };
    let below = command.find_subcommand(SERVICE_GROUP).into_iter().flat_map(Command::get_subcommands);
    for sub in command.get_subcommands().chain(below) {
        for arg in sub.get_arguments() {
            let Some(name) = arg.get_env() else { continue };
            let Some(value) = std::env::var_os(name) else { continue };
            let here = matches!(error.get(ContextKind::InvalidArg), Some(ContextValue::String(flag))
                if arg.get_long().is_some_and(|long| flag.starts_with(&format!("--{long} ")) || *flag == format!("--{long}")));
            let holds = value.to_string_lossy().contains(refused.as_str());
            if here
                && holds
                && !words.iter().any(|word| gives_flag(arg, &word.to_string_lossy()))
                && let Err(why) = check_word(arg, &value)
            {
                let what = format!("environment variable {}: {why}", name.to_string_lossy());
                return Some(Fault::usage(what, "correct or unset it"));
            }
        }
    }
    None
}
