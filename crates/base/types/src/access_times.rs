//! Whether reads change the access times of a source's files. Knows no mount option and no system call.

/// The rule for access times.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AccessTimes {
    /// That of the file system with the source.
    #[default]
    OfSource,
    /// Reads change none.
    Never,
    /// A read changes a time that is older than the last change of the file, or than a day.
    Relative,
    /// Every read changes the time.
    Always,
}

impl AccessTimes {
    /// The rule of a list of mount options: the last word about access times decides.
    pub fn of_options<'a>(words: impl DoubleEndedIterator<Item = &'a str>) -> AccessTimes {
        let rule_of = |word| match word {
            "atime" => Some(AccessTimes::OfSource),
            "noatime" => Some(AccessTimes::Never),
            "relatime" => Some(AccessTimes::Relative),
            "strictatime" => Some(AccessTimes::Always),
            _ => None,
        };
        words.rev().find_map(rule_of).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_word_decides() {
        let rule = |list: &str| AccessTimes::of_options(list.split(','));
        assert_eq!([rule("rw"), rule("noatime,rw"), rule("noatime,relatime")].map(|rule| rule as u8), [0, 1, 2]);
        assert_eq!([rule("strictatime"), rule("noatime,atime")].map(|rule| rule as u8), [3, 0]);
    }
}
