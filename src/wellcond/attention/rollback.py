from wellcond.attention.checks import Rollback as Rollback
