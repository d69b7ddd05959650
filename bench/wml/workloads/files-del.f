# Rows 41 and 42: delete every file of the set. A thread ends when none is left.

set $dir=/tmp
set $nfiles=4000000
set $filesize=4k
set $dirwidth=1000
set $nthreads=1

set mode quit alldone

define fileset name=data,path=$dir,entries=$nfiles,size=$filesize,dirwidth=$dirwidth,dirgamma=0,prealloc

define process name=remover,instances=1
{
  thread name=remover,instances=$nthreads
  {
    flowop deletefile name=delete,filesetname=data
  }
}

create files
psrun -10
