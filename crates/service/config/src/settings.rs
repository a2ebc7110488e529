//! The declaration of settings, and the parts that several checks share. Knows no setting.

use spurline_types::fault::Fault;
use std::fmt::Display;
use std::time::Duration;

/// Declares a group of settings: one description for the command line, the config file and programs.
///
/// The comment of a field is the help text; `-h` shows the first paragraph. `arg` takes the arguments of clap's attribute. The
/// default is behind `=`, as a number, or as a word with a parser: `parse_duration("5s")`; other fields have the default of the
/// type. The attributes count with the feature `clap` only, which the program requests and other front ends do not.
macro_rules! settings {
    (
        $(#[doc = $about:tt])*
        $(#[derive($($derived:ident),*)])?
        $(#[command($($group:tt)*)])?
        pub struct $name:ident {
            $(
                $(#[doc = $help:tt])*
                $(#[arg($($arg:tt)*)])?
                $(#[command($($flatten:tt)*)])?
                pub $field:ident: $type:ty $(= $($parser:ident)::+($word:literal))? $(= $number:literal)?,
            )*
        }
    ) => {
        $(#[doc = $about])*
        #[derive(Debug, Clone, PartialEq $(, $($derived),*)?)]
        #[cfg_attr(feature = "clap", derive(clap::Args))]
        $(#[cfg_attr(feature = "clap", command($($group)*))])?
        #[allow(rustdoc::broken_intra_doc_links, reason = "texts of --help have brackets of their own")]
        pub struct $name {
            $(
                $(#[doc = $help])*
                $(#[cfg_attr(feature = "clap", arg($($arg)*))])?
                $(#[cfg_attr(feature = "clap", arg(value_parser = $($parser)::+, default_value = $word))])?
                $(#[cfg_attr(feature = "clap", arg(default_value_t = $number))])?
                $(#[cfg_attr(feature = "clap", command($($flatten)*))])?
                pub $field: $type,
            )*
        }

        impl Default for $name {
            fn default() -> Self {
                $name { $($field: settings!(@default $($($parser)::+($word))? $($number)?),)* }
            }
        }
    };
    (@default) => { Default::default() };
    (@default $($parser:ident)::+($word:literal)) => { crate::settings::default_value($($parser)::+($word)) };
    (@default $number:literal) => { $number };
}

/// The default that a parser read.
///
/// # Panics
/// When the word is wrong; the tests read all defaults.
pub(crate) fn default_value<T>(parsed: Result<T, impl Display>) -> T {
    match parsed {
        Ok(value) => value,
        Err(why) => panic!("a default: {why}"),
    }
}

/// Refuses a deadline of zero.
pub(crate) fn check_positive(flag: &str, time: Duration) -> Result<(), Fault> {
    if time.is_zero() {
        return Err(Fault::usage(format!("{flag} 0 would fail every request"), "give a time such as 10s"));
    }
    Ok(())
}

/// A warning that names the given flags which have no effect, and why.
pub(crate) fn unused_flags(flags: &[(&str, bool)], why: &str) -> Option<String> {
    let given: Vec<&str> = flags.iter().filter(|(_, given)| *given).map(|(flag, _)| *flag).collect();
    let verb = match given.len() {
        0 => return None,
        1 => "is",
        _ => "are",
    };
    Some(format!("{} {verb} not used: {why}", given.join(", ")))
}
