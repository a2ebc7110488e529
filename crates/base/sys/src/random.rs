//! Random numbers of the system, for identities, marks and pauses that differ between hosts.

/// 64 random bits, which no other process can predict. The pool of the system is ready before any of our programs starts.
///
/// # Panics
/// On a kernel without getrandom(2) and without `/dev/urandom`: the standard library has no hash map there either.
pub fn random() -> u64 {
    getrandom::u64().expect("the system has random numbers")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_differ() {
        assert_ne!(random(), random());
    }
}
