// The ranks of a tensor-parallel group: processes on one machine that share a mapping.
#pragma once

#include <cstdint>

struct oct_group;

namespace octavo {

using Group = ::oct_group;

int group_rank(const Group* group);
int group_size(const Group* group);
// Whether there are more threads than cores.
bool is_crowded(const Group* group);

// Wait until all ranks are here: to be called by one thread of each. OCT_OK; OCT_ERR_ABORTED in all
// ranks if any of them said `stop`; OCT_ERR_PEER, from now on for ever, once the group is aborted. All
// writes before it are seen after it, by all ranks.
int32_t meet(Group* group, bool stop);

}  // namespace octavo
